/* Waiting for other ranks: a short spin, then sleep on this rank's own doorbell. */
#ifndef HOSTCX_WAIT_H
#define HOSTCX_WAIT_H

#include <stdint.h>

#include "communicator.h"

/* What a call waits for. */
struct condition {
    /* Whether to go on: true also when something is wrong, which the caller then finds itself. */
    bool (*ready)(const void *context);
    /* Whether the wait is (also) for this rank: if it leaves, the wait is in vain. */
    bool (*needs)(const void *context, int rank);
    const void *context;
};

/* Returns once the condition is ready, or with an error: a rank died, failed or left, or the
 * communicator is being aborted. */
flagcxResult_t wait_for(struct communicator *c, const struct condition *condition);

/* To be called after each store that another rank may wait for. */
void ring(struct communicator *c, int rank);

void ring_all(struct communicator *c);

/* Wakes this rank's own sleep. */
void ring_self(struct communicator *c);

/* Looks at what all ranks say of themselves, and at their processes if asked to: flagcxSuccess, or the
 * communicator's new error. condition may be NULL. */
flagcxResult_t check_ranks(struct communicator *c, const struct condition *condition, bool processes_too);

/* Sleeps while *word is value, at most for the time. */
void futex_sleep(_Atomic uint32_t *word, uint32_t value, int64_t nanoseconds);

void futex_wake(_Atomic uint32_t *word);

/* Nanoseconds that a rank may spin before it sleeps. */
int64_t longest_spin_for(int nranks);

#endif
