/* Rounding, wrapping and NaN, against other arithmetic: the reductions are called directly. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reduce.h"
#include "support.h"
#include "walks.h"

enum { ALL_16_BITS = 65536, RANDOM_PAIRS = 200000 };

static uint64_t random_state = 88172645463325252u;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static double as_number(uint16_t bits, flagcxDataType_t datatype) { return load(&bits, 0, datatype); }

/* The value that is nearest to the exact one, by looking at the neighbours of a guess; ties to even. */
static bool is_nearest(uint16_t found, double exact, flagcxDataType_t datatype)
{
    double is = as_number(found, datatype);
    uint16_t magnitude = found & 0x7fff;
    if (isinf(is)) {
        /* Infinity is right from halfway between the largest number and the next power of two on. */
        double largest = as_number((uint16_t)(found - 1), datatype);
        double before = as_number((uint16_t)(found - 2), datatype);
        return fabs(exact) >= fabs(largest) + fabs(largest - before) / 2 && (exact < 0) == (is < 0);
    }
    double error = fabs(is - exact);
    double up = fabs(as_number((uint16_t)(found + 1), datatype) - exact);
    double down = magnitude > 0 ? fabs(as_number((uint16_t)(found - 1), datatype) - exact) : INFINITY;
    if (isinf(as_number((uint16_t)(found + 1), datatype)))
        up = INFINITY;
    double nearest = up < down ? up : down;
    return error < nearest || (error == nearest && (found & 1) == 0);
}

static bool is_nan_16(uint16_t bits, flagcxDataType_t datatype) { return isnan(as_number(bits, datatype)); }

/* x + 0 and max(x, x) give x back, for every pattern: nothing is lost on the way through float32. */
static void check_identity(flagcxDataType_t datatype)
{
    uint16_t *all = malloc(ALL_16_BITS * sizeof *all), *zeros = calloc(ALL_16_BITS, sizeof *zeros);
    uint16_t *out = malloc(ALL_16_BITS * sizeof *out);
    const void *inputs[] = {all, zeros, zeros};
    size_t wrong = 0;
    for (unsigned i = 0; i < ALL_16_BITS; i++)
        all[i] = (uint16_t)i;
    for (int n = 2; n <= 3; n++) {
        reduction_for(datatype, flagcxSum)(out, inputs, n, ALL_16_BITS);
        for (unsigned i = 0; i < ALL_16_BITS; i++)
            wrong += is_nan_16(all[i], datatype) ? !is_nan_16(out[i], datatype) : out[i] != (i == 0x8000 ? 0 : i);
    }
    inputs[1] = all;
    reduction_for(datatype, flagcxMax)(out, inputs, 2, ALL_16_BITS);
    for (unsigned i = 0; i < ALL_16_BITS; i++)
        wrong += is_nan_16(all[i], datatype) ? !is_nan_16(out[i], datatype) : out[i] != i;
    CHECK_SAYING(wrong == 0, "type %d: %zu of %d patterns do not come back", datatype, wrong, 3 * ALL_16_BITS);
    free(all);
    free(zeros);
    free(out);
}

/* Products of random numbers, rounded once: of two 16-bit floats the product is exact in a double. */
static void check_rounding(flagcxDataType_t datatype, uint16_t exponents, uint16_t middle, uint16_t one_exponent)
{
    uint16_t a[256], b[256], out[256];
    const void *inputs[] = {a, b};
    size_t wrong = 0;
    for (int round = 0; round < RANDOM_PAIRS / 256; round++) {
        uint16_t exponent = round % 2 == 0 ? middle : (uint16_t)(middle + one_exponent);
        for (int i = 0; i < 256; i++) {
            a[i] = (uint16_t)next_random();
            /* Around one, so that results lie everywhere, among the subnormals and the overflows too. */
            b[i] = (uint16_t)((next_random() & (uint16_t)~exponents) | exponent);
        }
        reduction_for(datatype, flagcxProd)(out, inputs, 2, 256);
        for (int i = 0; i < 256; i++) {
            double exact = as_number(a[i], datatype) * as_number(b[i], datatype);
            if (isnan(exact))
                wrong += !is_nan_16(out[i], datatype);
            else if (isinf(exact))
                wrong += as_number(out[i], datatype) != exact;
            else if (datatype == flagcxFloat16 || fabs(exact) > 0x1p-100)
                wrong += !is_nearest(out[i], exact, datatype);
        }
    }
    CHECK_SAYING(wrong == 0, "type %d: %zu of %d products are not rounded to nearest even", datatype, wrong,
                 RANDOM_PAIRS);
}

/* Three numbers whose sum in 16 bits would be lost at the first addition. */
static void check_float_accumulation(void)
{
    const uint16_t half_big = 0x6800, half_one = 0x3c00; /* 2048, 1 */
    const uint16_t bfloat_big = 0x4380, bfloat_one = 0x3f80; /* 256, 1 */
    uint16_t out;
    const void *halves[] = {&half_big, &half_one, &half_one};
    const void *bfloats[] = {&bfloat_big, &bfloat_one, &bfloat_one};
    reduction_for(flagcxFloat16, flagcxSum)(&out, halves, 3, 1);
    CHECK(as_number(out, flagcxFloat16) == 2050);
    reduction_for(flagcxBfloat16, flagcxSum)(&out, bfloats, 3, 1);
    CHECK(as_number(out, flagcxBfloat16) == 258);
    /* The average of the largest half is itself: the sum lives in float32. */
    const uint16_t largest = 0x7bff;
    const void *largests[] = {&largest, &largest};
    reduction_for(flagcxFloat16, flagcxAvg)(&out, largests, 2, 1);
    CHECK(out == largest);
}

#define CHECK_INTEGER(T, DATATYPE, OP, A, B, WANTED)                                                         \
    do {                                                                                                     \
        T a_ = (T)(A), b_ = (T)(B), out_ = 0;                                                                \
        const void *inputs_[] = {&a_, &b_};                                                                  \
        reduction_for(DATATYPE, OP)(&out_, inputs_, 2, 1);                                                   \
        CHECK(out_ == (T)(WANTED));                                                                          \
    } while (0)

static void check_integers(void)
{
    CHECK_INTEGER(int8_t, flagcxInt8, flagcxSum, 100, 100, -56);
    CHECK_INTEGER(int8_t, flagcxInt8, flagcxAvg, 100, 100, -28);
    CHECK_INTEGER(int8_t, flagcxInt8, flagcxAvg, -3, -4, -3);
    CHECK_INTEGER(int8_t, flagcxInt8, flagcxMax, -128, 127, 127);
    CHECK_INTEGER(int8_t, flagcxInt8, flagcxMin, -128, 127, -128);
    CHECK_INTEGER(uint8_t, flagcxUint8, flagcxAvg, 200, 100, 22);
    CHECK_INTEGER(uint8_t, flagcxUint8, flagcxMax, 200, 100, 200);
    CHECK_INTEGER(int32_t, flagcxInt32, flagcxSum, INT32_MAX, 1, INT32_MIN);
    CHECK_INTEGER(int32_t, flagcxInt32, flagcxProd, 65536, 65536, 0);
    CHECK_INTEGER(int32_t, flagcxInt32, flagcxAvg, -7, 0, -3);
    CHECK_INTEGER(uint32_t, flagcxUint32, flagcxMin, UINT32_MAX, 1, 1);
    CHECK_INTEGER(uint32_t, flagcxUint32, flagcxAvg, 7, 0, 3);
    CHECK_INTEGER(int64_t, flagcxInt64, flagcxSum, INT64_MAX, 1, INT64_MIN);
    CHECK_INTEGER(int64_t, flagcxInt64, flagcxMin, INT64_MIN, 5, INT64_MIN);
    CHECK_INTEGER(int64_t, flagcxInt64, flagcxAvg, -9, 0, -4);
    CHECK_INTEGER(uint64_t, flagcxUint64, flagcxMax, UINT64_MAX, 5, UINT64_MAX);
    CHECK_INTEGER(uint64_t, flagcxUint64, flagcxAvg, 9, 0, 4);
}

static void check_nan(void)
{
    float numbers[] = {NAN, 2, NAN}, others[] = {1, NAN, NAN}, out[3];
    const void *inputs[] = {numbers, others};
    reduction_for(flagcxFloat32, flagcxMax)(out, inputs, 2, 3);
    CHECK(out[0] == 1 && out[1] == 2 && isnan(out[2]));
    reduction_for(flagcxFloat32, flagcxMin)(out, inputs, 2, 3);
    CHECK(out[0] == 1 && out[1] == 2 && isnan(out[2]));
    reduction_for(flagcxFloat32, flagcxSum)(out, inputs, 2, 3);
    CHECK(isnan(out[0]) && isnan(out[1]) && isnan(out[2]));
}

/* Buffers that lie askew, and an output that is an input. */
static void check_placement(void)
{
    char *memory = malloc(3 * 404 + 3);
    void *a = memory + 1, *b = memory + 404 + 2, *c = memory + 808 + 3;
    const void *inputs[] = {a, b, c};
    bool right = true;
    for (size_t i = 0; i < 100; i++) {
        float values[] = {(float)i, 2 * (float)i, 4 * (float)i};
        memcpy(memory + 1 + 4 * i, &values[0], 4);
        memcpy(memory + 406 + 4 * i, &values[1], 4);
        memcpy(memory + 811 + 4 * i, &values[2], 4);
    }
    reduction_for(flagcxFloat32, flagcxSum)(b, inputs, 3, 100);
    for (size_t i = 0; i < 100; i++) {
        float found;
        memcpy(&found, memory + 406 + 4 * i, 4);
        right = right && found == 7 * (float)i;
    }
    CHECK(right);
    free(memory);
}

void walk_arithmetic(void)
{
    check_identity(flagcxFloat16);
    check_identity(flagcxBfloat16);
    check_rounding(flagcxFloat16, 0x7c00, 0x3800, 0x0400);
    check_rounding(flagcxBfloat16, 0x7f80, 0x3f00, 0x0080);
    check_float_accumulation();
    check_integers();
    check_nan();
    check_placement();
}
