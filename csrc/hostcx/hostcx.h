/* What hostcx offers beyond FlagCX's API: how often each function was called, so that tests and
 * benchmarks can assert that their calls arrived. Counts are of this process and never go down. */
#ifndef HOSTCX_H
#define HOSTCX_H

#include "flagcx_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* All calls of flagcx* functions of this process so far. */
FLAGCX_API uint64_t hostcxCallCount(void);

/* Calls of one function, by its name ("flagcxAllReduce"); UINT64_MAX for a name that is not counted. */
FLAGCX_API uint64_t hostcxCallCountOf(const char *function);

/* The counted functions: name of number 0, 1, ...; NULL past the last. */
FLAGCX_API const char *hostcxCallName(int number);

#ifdef __cplusplus
}
#endif

#endif
