/* The reduction loops, as plain C that compilers vectorise. Compiled once per instruction set: REDUCTIONS
 * names the table that this compilation defines. */
#include <stdint.h>
#include <string.h>

#include "reduce.h"

#if defined(__clang__)
#define VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#else
#define VECTORIZE _Pragma("GCC ivdep")
#endif

/* Callers' buffers may lie anywhere and hold any type. */
#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef int8_t ANYWHERE int8_anywhere;
typedef uint8_t ANYWHERE uint8_anywhere;
typedef int32_t ANYWHERE int32_anywhere;
typedef uint32_t ANYWHERE uint32_anywhere;
typedef int64_t ANYWHERE int64_anywhere;
typedef uint64_t ANYWHERE uint64_anywhere;
typedef float ANYWHERE float_anywhere;
typedef double ANYWHERE double_anywhere;
typedef uint16_t ANYWHERE half_anywhere;
typedef uint16_t ANYWHERE bfloat_anywhere;

/* Elements that stay in the first-level cache while more than two buffers are added up. */
enum { BLOCK = 512 };

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bfloat(uint16_t value) { return float_of((uint32_t)value << 16); }

static inline uint16_t to_bfloat(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

/* IEEE 754 binary16: 5 exponent bits with bias 15, 10 fraction bits. No step makes a subnormal float,
 * so the result does not depend on a flush-to-zero mode of the calling thread. */
static inline float from_half(uint16_t value)
{
    uint32_t magnitude = ((uint32_t)value & 0x7fffu) << 13;
    uint32_t exponent = magnitude & 0x0f800000u;
    uint32_t normal = magnitude + ((127u - 15u) << 23);
    uint32_t special = normal + ((128u - 16u) << 23);
    uint32_t subnormal = bits_of(float_of(normal + (1u << 23)) - float_of((127u - 14u) << 23));
    uint32_t bits = exponent == 0x0f800000u ? special : exponent == 0 ? subnormal : normal;
    return float_of(bits | ((uint32_t)value & 0x8000u) << 16);
}

static inline uint16_t to_half(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t sign = bits & 0x80000000u;
    uint32_t magnitude = bits ^ sign;
    /* Adding this makes the floating point unit round at the position of half's last subnormal bit. */
    const uint32_t subnormal_rounder = (127u - 15u + 23u - 10u + 1u) << 23;
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t subnormal = bits_of(float_of(magnitude) + float_of(subnormal_rounder)) - subnormal_rounder;
    uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t half = magnitude < (127u - 14u) << 23 ? subnormal : normal;
    half = magnitude >= (127u + 16u) << 23 ? special : half;
    return (uint16_t)(half | sign >> 16);
}

#define SAME(x) (x)
#define SUM(T, a, b) ((T)((a) + (b)))
#define PRODUCT(T, a, b) ((T)((a) * (b)))
#define INTEGER_MAXIMUM(T, a, b) ((T)((a) > (b) ? (a) : (b)))
#define INTEGER_MINIMUM(T, a, b) ((T)((a) < (b) ? (a) : (b)))
/* b != b holds for a NaN alone. */
#define FLOAT_MAXIMUM(T, a, b) ((T)((a) >= (b) || (b) != (b) ? (a) : (b)))
#define FLOAT_MINIMUM(T, a, b) ((T)((a) <= (b) || (b) != (b) ? (a) : (b)))
#define KEEP(x, n) (x)
#define AVERAGE_INT8(x, n) ((uint8_t)((int)(int8_t)(x) / (n)))
#define AVERAGE_UINT8(x, n) ((uint8_t)((unsigned)(x) / (unsigned)(n)))
#define AVERAGE_INT32(x, n) ((uint32_t)((int32_t)(x) / (int32_t)(n)))
#define AVERAGE_UINT32(x, n) ((uint32_t)((x) / (uint32_t)(n)))
#define AVERAGE_INT64(x, n) ((uint64_t)((int64_t)(x) / (int64_t)(n)))
#define AVERAGE_UINT64(x, n) ((uint64_t)((x) / (uint64_t)(n)))
#define AVERAGE_FLOAT(x, n) ((x) / (float)(n))
#define AVERAGE_DOUBLE(x, n) ((x) / (double)(n))

/* T: as it lies in memory. A: as it is added up. */
#define DEFINE_REDUCTION(NAME, T, A, LOAD, STORE, COMBINE, FINISH)                                           \
    static void NAME(void *out, const void *const *inputs, int n, size_t count)                              \
    {                                                                                                        \
        T *to = out;                                                                                         \
        const T *first = inputs[0];                                                                          \
        const T *second = inputs[1];                                                                         \
        const T *last = inputs[n - 1];                                                                       \
        A block[BLOCK];                                                                                      \
        if (n == 2) {                                                                                        \
            VECTORIZE                                                                                        \
            for (size_t i = 0; i < count; i++)                                                               \
                to[i] = STORE(FINISH(COMBINE(A, LOAD(first[i]), LOAD(second[i])), 2));                       \
            return;                                                                                          \
        }                                                                                                    \
        for (size_t start = 0; start < count; start += BLOCK) {                                              \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                   \
            for (size_t i = 0; i < length; i++)                                                              \
                block[i] = COMBINE(A, LOAD(first[start + i]), LOAD(second[start + i]));                      \
            for (int k = 2; k < n - 1; k++) {                                                                \
                const T *next = inputs[k];                                                                   \
                for (size_t i = 0; i < length; i++)                                                          \
                    block[i] = COMBINE(A, block[i], LOAD(next[start + i]));                                  \
            }                                                                                                \
            VECTORIZE                                                                                        \
            for (size_t i = 0; i < length; i++)                                                              \
                to[start + i] = STORE(FINISH(COMBINE(A, block[i], LOAD(last[start + i])), n));               \
        }                                                                                                    \
    }

/* Signed sums and products are made unsigned, where wrapping is defined. */
#define DEFINE_INTEGER(BITS, AVERAGE_SIGNED, AVERAGE_UNSIGNED)                                               \
    DEFINE_REDUCTION(sum_uint##BITS, uint##BITS##_anywhere, uint##BITS##_t, SAME, SAME, SUM, KEEP)           \
    DEFINE_REDUCTION(prod_uint##BITS, uint##BITS##_anywhere, uint##BITS##_t, SAME, SAME, PRODUCT, KEEP)      \
    DEFINE_REDUCTION(max_uint##BITS, uint##BITS##_anywhere, uint##BITS##_t, SAME, SAME, INTEGER_MAXIMUM, KEEP) \
    DEFINE_REDUCTION(min_uint##BITS, uint##BITS##_anywhere, uint##BITS##_t, SAME, SAME, INTEGER_MINIMUM, KEEP) \
    DEFINE_REDUCTION(max_int##BITS, int##BITS##_anywhere, int##BITS##_t, SAME, SAME, INTEGER_MAXIMUM, KEEP)  \
    DEFINE_REDUCTION(min_int##BITS, int##BITS##_anywhere, int##BITS##_t, SAME, SAME, INTEGER_MINIMUM, KEEP)  \
    DEFINE_REDUCTION(avg_int##BITS, uint##BITS##_anywhere, uint##BITS##_t, SAME, SAME, SUM, AVERAGE_SIGNED)  \
    DEFINE_REDUCTION(avg_uint##BITS, uint##BITS##_anywhere, uint##BITS##_t, SAME, SAME, SUM, AVERAGE_UNSIGNED)

#define DEFINE_FLOAT(NAME, T, A, LOAD, STORE, AVERAGE)                                                       \
    DEFINE_REDUCTION(sum_##NAME, T, A, LOAD, STORE, SUM, KEEP)                                               \
    DEFINE_REDUCTION(prod_##NAME, T, A, LOAD, STORE, PRODUCT, KEEP)                                          \
    DEFINE_REDUCTION(max_##NAME, T, A, LOAD, STORE, FLOAT_MAXIMUM, KEEP)                                     \
    DEFINE_REDUCTION(min_##NAME, T, A, LOAD, STORE, FLOAT_MINIMUM, KEEP)                                     \
    DEFINE_REDUCTION(avg_##NAME, T, A, LOAD, STORE, SUM, AVERAGE)

DEFINE_INTEGER(8, AVERAGE_INT8, AVERAGE_UINT8)
DEFINE_INTEGER(32, AVERAGE_INT32, AVERAGE_UINT32)
DEFINE_INTEGER(64, AVERAGE_INT64, AVERAGE_UINT64)
DEFINE_FLOAT(float16, half_anywhere, float, from_half, to_half, AVERAGE_FLOAT)
DEFINE_FLOAT(float32, float_anywhere, float, SAME, SAME, AVERAGE_FLOAT)
DEFINE_FLOAT(float64, double_anywhere, double, SAME, SAME, AVERAGE_DOUBLE)
DEFINE_FLOAT(bfloat16, bfloat_anywhere, float, from_bfloat, to_bfloat, AVERAGE_FLOAT)

#define SIGNED_ROW(BITS) {sum_uint##BITS, prod_uint##BITS, max_int##BITS, min_int##BITS, avg_int##BITS}
#define ROW(NAME) {sum_##NAME, prod_##NAME, max_##NAME, min_##NAME, avg_##NAME}

/* Columns in the order of flagcxRedOp_t: sum, prod, max, min, avg. */
const reduction_table REDUCTIONS = {
    [flagcxInt8] = SIGNED_ROW(8),      [flagcxUint8] = ROW(uint8),     [flagcxInt32] = SIGNED_ROW(32),
    [flagcxUint32] = ROW(uint32),      [flagcxInt64] = SIGNED_ROW(64), [flagcxUint64] = ROW(uint64),
    [flagcxFloat16] = ROW(float16),    [flagcxFloat32] = ROW(float32), [flagcxFloat64] = ROW(float64),
    [flagcxBfloat16] = ROW(bfloat16),
};
