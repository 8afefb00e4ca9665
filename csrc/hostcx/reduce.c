/* Which reduction to use: by type, operation and what the processor can do. */
#include "reduce.h"

size_t element_bytes(flagcxDataType_t datatype)
{
    static const unsigned char bytes[flagcxNumTypes] = {
        [flagcxInt8] = 1,    [flagcxUint8] = 1,   [flagcxInt32] = 4,   [flagcxUint32] = 4,  [flagcxInt64] = 8,
        [flagcxUint64] = 8,  [flagcxFloat16] = 2, [flagcxFloat32] = 4, [flagcxFloat64] = 8, [flagcxBfloat16] = 2,
    };
    if ((int)datatype < 0 || (int)datatype >= flagcxNumTypes)
        return 0;
    return bytes[datatype];
}

reduction reduction_for(flagcxDataType_t datatype, flagcxRedOp_t op)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2"))
        return reductions_avx2[datatype][op];
#endif
    return reductions_baseline[datatype][op];
}
