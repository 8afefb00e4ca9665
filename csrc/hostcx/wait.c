/* Waiting for other ranks: spin, sleep, and look after the others while asleep.
 *
 * A rank that is about to sleep says so (sleeping = 1) and then looks once more; a rank that publishes
 * stores first and then looks at sleeping. All four are sequentially consistent, so one of the two
 * sees the other. A lost wake-up would cost one period of the look-out, never a hang.
 */
#include "wait.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    LOOKOUT_NANOSECONDS = 50 * 1000 * 1000,
    LONGEST_SPIN_NANOSECONDS = 50 * 1000,
    SHORTEST_SPIN_NANOSECONDS = 1000,
    SPINS_PER_LOOK_AT_THE_CLOCK = 16,
    WAITS_PER_LONG_TRY = 64,
};

static void spin_once(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_nanoseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void futex_sleep(_Atomic uint32_t *word, uint32_t value, int64_t nanoseconds)
{
    struct timespec limit = {.tv_sec = nanoseconds / 1000000000, .tv_nsec = nanoseconds % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

int64_t longest_spin_for(int nranks)
{
    cpu_set_t cpus;
    /* Fails where a machine may have more processors than the set has room for. */
    bool is_known = sched_getaffinity(0, sizeof cpus, &cpus) == 0;
    long processors = is_known ? CPU_COUNT(&cpus) : sysconf(_SC_NPROCESSORS_ONLN);
    /* With more ranks than processors a spinning rank keeps away the one that it waits for. */
    return nranks <= processors ? LONGEST_SPIN_NANOSECONDS : 0;
}

static void ring_doorbell(struct rank_slot *slot)
{
    atomic_fetch_add(&slot->doorbell, 1);
    futex_wake(&slot->doorbell);
}

void ring(struct communicator *c, int rank)
{
    struct rank_slot *slot = slot_of(c, rank);
    if (atomic_load(&slot->sleeping) != 0)
        ring_doorbell(slot);
}

void ring_all(struct communicator *c)
{
    for (int rank = 0; rank < c->nranks; rank++)
        if (rank != c->rank)
            ring(c, rank);
}

void ring_self(struct communicator *c) { ring_doorbell(slot_of(c, c->rank)); }

static bool spin_for(const struct condition *condition, int64_t nanoseconds)
{
    int64_t end = now_nanoseconds() + nanoseconds;
    do {
        for (int i = 0; i < SPINS_PER_LOOK_AT_THE_CLOCK; i++) {
            spin_once();
            if (condition->ready(condition->context))
                return true;
        }
    } while (now_nanoseconds() < end);
    return false;
}

/* Spinning pays while the other rank runs on another processor. Where the two share one it only keeps
 * the other away; nothing says which it is, so the time follows what spinning was worth lately. */
static bool spin_until(struct communicator *c, const struct condition *condition)
{
    if (condition->ready(condition->context))
        return true;
    if (c->longest_spin == 0)
        return false;
    bool long_try = ++c->waits % WAITS_PER_LONG_TRY == 0;
    bool met = spin_for(condition, long_try ? c->longest_spin : c->spin);
    if (met && c->spin < c->longest_spin)
        c->spin *= 2;
    else if (!met && !long_try && c->spin > SHORTEST_SPIN_NANOSECONDS)
        c->spin /= 2;
    return met;
}

/* Sleeps until the doorbell rings or it is time to look after the others. */
static void sleep_unless(struct communicator *c, const struct condition *condition)
{
    struct rank_slot *slot = slot_of(c, c->rank);
    uint32_t doorbell = atomic_load(&slot->doorbell);
    atomic_store(&slot->sleeping, 1);
    if (!condition->ready(condition->context) && !atomic_load(&c->handle->aborting))
        futex_sleep(&slot->doorbell, doorbell, LOOKOUT_NANOSECONDS);
    atomic_store(&slot->sleeping, 0);
}

static const char *state_words(uint32_t state)
{
    if (state == RANK_LEFT)
        return "has destroyed the communicator";
    if (state == RANK_ABORTED)
        return "has aborted the communicator";
    return "has given the communicator up after an error of its own";
}

static bool has_died(const struct communicator *c, int rank)
{
    return !c->peers[rank].same_process && watch_gone(&c->peers[rank].watch);
}

flagcxResult_t check_ranks(struct communicator *c, const struct condition *condition, bool processes_too)
{
    for (int rank = 0; rank < c->nranks; rank++) {
        if (rank == c->rank)
            continue;
        const struct rank_slot *slot = slot_of(c, rank);
        uint32_t state = atomic_load(&slot->state);
        bool gone = processes_too && state == RANK_JOINED && has_died(c, rank);
        bool needed = condition != NULL && condition->needs(condition->context, rank);
        if (state == RANK_JOINED && !gone)
            continue;
        if ((state == RANK_LEFT || state == RANK_ABORTED) && !needed)
            continue;
        /* It may have done its part before it went. */
        if (condition != NULL && condition->ready(condition->context))
            return flagcxSuccess;
        if (gone && atomic_load(&slot->state) != RANK_JOINED)
            return flagcxSuccess;
        if (gone)
            return fail_communicator(c, flagcxRemoteError, "rank %d (process %d) has died", rank,
                                     (int)c->peers[rank].watch.pid);
        return fail_communicator(c, flagcxRemoteError, "rank %d (process %d) %s", rank,
                                 (int)c->peers[rank].watch.pid, state_words(state));
    }
    return flagcxSuccess;
}

flagcxResult_t wait_for(struct communicator *c, const struct condition *condition)
{
    if (spin_until(c, condition))
        return flagcxSuccess;
    int64_t next_lookout = now_nanoseconds() + LOOKOUT_NANOSECONDS / 2;
    for (;;) {
        sleep_unless(c, condition);
        if (condition->ready(condition->context))
            return flagcxSuccess;
        if (atomic_load(&c->handle->aborting))
            return fail_call(c->handle, flagcxInternalError, "the communicator was aborted during the call");
        /* Many wake-ups may come while nobody dies: processes are looked at as seldom as in a long sleep. */
        int64_t now = now_nanoseconds();
        bool is_time = now >= next_lookout;
        if (is_time)
            next_lookout = now + LOOKOUT_NANOSECONDS / 2;
        flagcxResult_t result = check_ranks(c, condition, is_time);
        if (result != flagcxSuccess)
            return result;
    }
}
