/* What a call is, as a number to compare and as words to read. */
#include <stdio.h>

#include "operation.h"

enum { COUNT_BITS = 40, ROOT_BITS = 10, SMALL_BITS = 4 };

uint64_t signature_of(const struct operation *operation)
{
    bool between_two = operation->call == CALL_flagcxSend || operation->call == CALL_flagcxRecv;
    enum call call = between_two ? CALL_flagcxSend : operation->call;
    int root = between_two ? 0 : operation->root;
    uint64_t signature = operation->count & (((uint64_t)1 << COUNT_BITS) - 1);
    signature = signature << ROOT_BITS | ((uint64_t)root & ((1u << ROOT_BITS) - 1));
    signature = signature << SMALL_BITS | ((uint64_t)operation->datatype & ((1u << SMALL_BITS) - 1));
    signature = signature << SMALL_BITS | ((uint64_t)operation->op & ((1u << SMALL_BITS) - 1));
    return signature << SMALL_BITS | (uint64_t)(call - CALL_flagcxBarrier);
}

static unsigned take_bits(uint64_t *signature, int bits)
{
    unsigned value = (unsigned)(*signature & (((uint64_t)1 << bits) - 1));
    *signature >>= bits;
    return value;
}

/* Every number is checked before it selects a name. */
void describe_signature(uint64_t signature, char *text, size_t room)
{
    static const char *const types[flagcxNumTypes] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                                      "uint64", "float16", "float32", "float64", "bfloat16"};
    static const char *const ops[flagcxNumRedOps] = {"sum", "prod", "max", "min", "avg"};
    unsigned call = take_bits(&signature, SMALL_BITS) + CALL_flagcxBarrier;
    unsigned op = take_bits(&signature, SMALL_BITS);
    unsigned type = take_bits(&signature, SMALL_BITS);
    unsigned root = take_bits(&signature, ROOT_BITS);
    snprintf(text, room, "%s(count %llu, %s, %s, root %u)", call <= CALL_flagcxSend ? call_name(call) : "?",
             (unsigned long long)signature, type < flagcxNumTypes ? types[type] : "?",
             op < flagcxNumRedOps ? ops[op] : "?", root);
}
