/* Steps of collectives: flow control over the stages, and checks of everything that others wrote. */
#include "steps.h"

#include <stdio.h>

#include "planted.h"
#include "wait.h"

enum { COUNT_BITS = 40, ROOT_BITS = 10, SMALL_BITS = 4 };

struct awaited {
    const struct communicator *c;
    int rank;
    uint64_t value;
    uint64_t signature;
};

uint64_t signature_of(const struct operation *operation)
{
    uint64_t signature = operation->count & (((uint64_t)1 << COUNT_BITS) - 1);
    signature = signature << ROOT_BITS | ((uint64_t)operation->root & ((1u << ROOT_BITS) - 1));
    signature = signature << SMALL_BITS | ((uint64_t)operation->datatype & ((1u << SMALL_BITS) - 1));
    signature = signature << SMALL_BITS | ((uint64_t)operation->op & ((1u << SMALL_BITS) - 1));
    return signature << SMALL_BITS | (uint64_t)(operation->call - CALL_flagcxBarrier);
}

static unsigned take_bits(uint64_t *signature, int bits)
{
    unsigned value = (unsigned)(*signature & (((uint64_t)1 << bits) - 1));
    *signature >>= bits;
    return value;
}

/* The signature may be another process's nonsense: every number is checked before it selects a name. */
static void describe(uint64_t signature, char *text, size_t room)
{
    static const char *const types[flagcxNumTypes] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                                      "uint64", "float16", "float32", "float64", "bfloat16"};
    static const char *const ops[flagcxNumRedOps] = {"sum", "prod", "max", "min", "avg"};
    unsigned call = take_bits(&signature, SMALL_BITS) + CALL_flagcxBarrier;
    unsigned op = take_bits(&signature, SMALL_BITS);
    unsigned type = take_bits(&signature, SMALL_BITS);
    unsigned root = take_bits(&signature, ROOT_BITS);
    snprintf(text, room, "%s(count %llu, %s, %s, root %u)", call <= CALL_flagcxAlltoAllv ? call_name(call) : "?",
             (unsigned long long)signature, type < flagcxNumTypes ? types[type] : "?",
             op < flagcxNumRedOps ? ops[op] : "?", root);
}

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
    describe(mine, here, sizeof here);
    describe(theirs, there, sizeof there);
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
