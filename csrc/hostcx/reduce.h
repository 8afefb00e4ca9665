/* Reduction of several buffers into one. */
#ifndef HOSTCX_REDUCE_H
#define HOSTCX_REDUCE_H

#include <stddef.h>

#include "flagcx_api.h"

/* Reduces n >= 2 buffers of count elements, in the order in which they are given.
 * float16 and bfloat16 are added up in float32 and rounded once, to nearest even. Integers wrap.
 * The average is the sum divided by n; of integers, rounded towards zero, of the wrapped sum.
 * Maximum and minimum ignore a NaN if the other value is a number.
 * out may be one of the inputs. No buffer needs to be aligned. */
typedef void (*reduction)(void *out, const void *const *inputs, int n, size_t count);

/* The reduction of this type and operation on this processor. Both must be valid. */
reduction reduction_for(flagcxDataType_t datatype, flagcxRedOp_t op);

/* Bytes of one element; 0 for a type that does not exist. */
size_t element_bytes(flagcxDataType_t datatype);

typedef reduction reduction_table[flagcxNumTypes][flagcxNumRedOps];
extern const reduction_table reductions_baseline;
#ifdef __x86_64__
extern const reduction_table reductions_avx2;
#endif

#endif
