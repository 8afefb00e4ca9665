/* Counting of calls: relaxed atomic counters, one per function. */
#include "counts.h"

#include <stdatomic.h>
#include <string.h>

#include "hostcx.h"

static _Atomic uint64_t counts[NUMBER_OF_CALLS];

static const char *const names[NUMBER_OF_CALLS] = {
#define CALL_NAME(name) #name,
    FOR_EACH_CALL(CALL_NAME)
#undef CALL_NAME
};

void count_call(enum call call) { atomic_fetch_add_explicit(&counts[call], 1, memory_order_relaxed); }

const char *call_name(enum call call) { return names[call]; }

uint64_t hostcxCallCount(void)
{
    uint64_t total = 0;
    for (int i = 0; i < NUMBER_OF_CALLS; i++)
        total += atomic_load_explicit(&counts[i], memory_order_relaxed);
    return total;
}

uint64_t hostcxCallCountOf(const char *function)
{
    for (int i = 0; function != NULL && i < NUMBER_OF_CALLS; i++)
        if (strcmp(function, names[i]) == 0)
            return atomic_load_explicit(&counts[i], memory_order_relaxed);
    return UINT64_MAX;
}

const char *hostcxCallName(int number)
{
    return number < 0 || number >= NUMBER_OF_CALLS ? NULL : names[number];
}
