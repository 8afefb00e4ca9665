/* Steps of collectives: flow control over the stages, and checks of everything that others wrote. */
#include "steps.h"

#include "planted.h"
#include "wait.h"

struct awaited {
    const struct communicator *c;
    int rank;
    uint64_t value;
    uint64_t signature;
};

/* Whether the rank is in another collective. While this rank is in its own, the other cannot have passed
 * its own, so all that it has posted since the first step must be the same. */
static bool disagrees(const struct communicator *c, int rank, uint64_t mine)
{
    const struct rank_slot *slot = slot_of(c, rank);
    uint64_t posted = atomic_load_explicit(&slot->posted, PUBLISHING_ORDER);
    if (posted <= c->first_step)
        return false;
    return atomic_load_explicit(&slot->signatures[(posted - 1) % STAGES], memory_order_relaxed) != mine;
}

static bool posted_enough(const void *context)
{
    const struct awaited *awaited = context;
    return atomic_load_explicit(&slot_of(awaited->c, awaited->rank)->posted, PUBLISHING_ORDER) >= awaited->value ||
           disagrees(awaited->c, awaited->rank, awaited->signature);
}

static bool finished_enough(const void *context)
{
    const struct awaited *awaited = context;
    return atomic_load(&slot_of(awaited->c, awaited->rank)->finished) >= awaited->value ||
           disagrees(awaited->c, awaited->rank, awaited->signature);
}

static bool is_awaited(const void *context, int rank) { return ((const struct awaited *)context)->rank == rank; }

static flagcxResult_t damaged(struct communicator *c, int rank, const char *what, uint64_t value)
{
    return fail_communicator(c, flagcxInternalError, "the shared memory is damaged: rank %d says %s=%llu in step %llu",
                             rank, what, (unsigned long long)value, (unsigned long long)c->step);
}

static flagcxResult_t check_signature(struct communicator *c, int rank, uint64_t step, uint64_t mine)
{
    uint64_t theirs = atomic_load_explicit(&slot_of(c, rank)->signatures[step % STAGES], memory_order_relaxed);
    char here[128], there[128];
    if (theirs == mine)
        return flagcxSuccess;
    describe_signature(mine, here, sizeof here);
    describe_signature(theirs, there, sizeof there);
    return fail_communicator(c, flagcxInvalidUsage, "the ranks do not make the same call: this rank calls %s, rank %d "
                                                    "calls %s",
                             here, rank, there);
}

static flagcxResult_t check_last_signature(struct communicator *c, int rank, uint64_t mine)
{
    return check_signature(c, rank, atomic_load(&slot_of(c, rank)->posted) - 1, mine);
}

/* Waits until the rank has finished as many steps, unless it is in another collective. */
static flagcxResult_t await_finished(struct communicator *c, int rank, uint64_t steps, uint64_t signature)
{
    struct peer *peer = &c->peers[rank];
    if (peer->finished >= steps)
        return flagcxSuccess;
    struct awaited awaited = {.c = c, .rank = rank, .value = steps, .signature = signature};
    struct condition condition = {.ready = finished_enough, .needs = is_awaited, .context = &awaited};
    flagcxResult_t result = wait_for(c, &condition);
    if (result != flagcxSuccess)
        return result;
    uint64_t finished = atomic_load(&slot_of(c, rank)->finished);
    if (finished < steps && disagrees(c, rank, signature))
        return check_last_signature(c, rank, signature);
    /* It must be what was waited for, and no rank can be further than this rank's own stages allow. */
    if (finished < steps || finished > c->step + STAGES)
        return damaged(c, rank, "finished", finished);
    peer->finished = finished;
    return flagcxSuccess;
}

flagcxResult_t step_acquire(struct communicator *c, uint64_t signature, char **stage)
{
    for (int rank = 0; c->step >= STAGES && rank < c->nranks; rank++) {
        if (rank == c->rank)
            continue;
        flagcxResult_t result = await_finished(c, rank, c->step + 1 - STAGES, signature);
        if (result != flagcxSuccess)
            return result;
    }
    *stage = stage_bytes(c->segment, c->rank, c->step);
    return flagcxSuccess;
}

void step_post(struct communicator *c, uint64_t signature)
{
    struct rank_slot *slot = slot_of(c, c->rank);
    atomic_store_explicit(&slot->signatures[c->step % STAGES], signature, memory_order_relaxed);
    atomic_store_explicit(&slot->posted, c->step + 1, PUBLISHING_ORDER);
    ring_all(c);
}

flagcxResult_t step_await(struct communicator *c, int rank, uint64_t signature, const char **stage)
{
    struct peer *peer = &c->peers[rank];
    if (peer->posted <= c->step) {
        struct awaited awaited = {.c = c, .rank = rank, .value = c->step + 1, .signature = signature};
        struct condition condition = {.ready = posted_enough, .needs = is_awaited, .context = &awaited};
        flagcxResult_t result = wait_for(c, &condition);
        if (result != flagcxSuccess)
            return result;
        uint64_t posted = atomic_load_explicit(&slot_of(c, rank)->posted, PUBLISHING_ORDER);
        if (posted <= c->step && disagrees(c, rank, signature))
            return check_last_signature(c, rank, signature);
        if (posted <= c->step || posted > c->step + STAGES)
            return damaged(c, rank, "posted", posted);
        peer->posted = posted;
    }
    *stage = stage_bytes(c->segment, rank, c->step);
    return check_signature(c, rank, c->step, signature);
}

void step_finish(struct communicator *c)
{
    c->step++;
    atomic_store(&slot_of(c, c->rank)->finished, c->step);
    ring_all(c);
}
