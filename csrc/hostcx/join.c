/* How the ranks of a communicator meet: each takes its slot, all wait until all slots are taken. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "communicator.h"
#include "wait.h"

enum { JOIN_LOOKOUT_NANOSECONDS = 50 * 1000 * 1000, SECONDS_UNTIL_NOTICE = 10 };

static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;
static struct flagcxComm *handles;

static struct flagcxComm *new_handle(int nranks, int rank)
{
    struct flagcxComm *comm = calloc(1, sizeof *comm);
    if (comm == NULL)
        return NULL;
    pthread_mutex_init(&comm->call_lock, NULL);
    pthread_mutex_init(&comm->state_lock, NULL);
    pthread_mutex_init(&comm->message_lock, NULL);
    comm->rank = rank;
    comm->nranks = nranks;
    comm->generation = fork_generation();
    return comm;
}

static void keep_handle(struct flagcxComm *comm)
{
    pthread_mutex_lock(&handles_lock);
    comm->next = handles;
    handles = comm;
    pthread_mutex_unlock(&handles_lock);
}

static void say_that_joining_changed(struct communicator *c)
{
    struct segment_header *header = segment_header(c->segment);
    atomic_fetch_add(&header->joining, 1);
    futex_wake(&header->joining);
}

static flagcxResult_t take_slot(struct communicator *c)
{
    struct rank_slot *slot = slot_of(c, c->rank);
    uint32_t undecided = 0;
    int32_t free_slot = 0;
    if (!atomic_compare_exchange_strong(&segment_header(c->segment)->nranks, &undecided, (uint32_t)c->nranks) &&
        undecided != (uint32_t)c->nranks)
        return fail(flagcxInvalidArgument, "flagcxCommInitRank: rank %d says nranks=%d, another rank of the same id "
                                           "said nranks=%u",
                    c->rank, c->nranks, undecided);
    if (!atomic_compare_exchange_strong(&slot->pid, &free_slot, (int32_t)getpid()))
        return fail(flagcxInvalidUsage, "flagcxCommInitRank: rank %d of %d has been taken by process %d; each rank "
                                        "joins once, and an id makes one communicator",
                    c->rank, c->nranks, (int)free_slot);
    atomic_store(&slot->start_time, start_time_of(getpid()));
    atomic_store(&slot->state, RANK_JOINED);
    say_that_joining_changed(c);
    return flagcxSuccess;
}

static void start_watching(struct communicator *c, int rank, pid_t pid, uint64_t start_time)
{
    struct peer *peer = &c->peers[rank];
    peer->same_process = pid == getpid();
    if (peer->same_process)
        peer->watch.pid = pid;
    else
        watch_open(&peer->watch, pid, start_time);
}

/* Looks at one rank: *missing if it has not come yet. */
static flagcxResult_t look_at(struct communicator *c, int rank, bool *missing)
{
    struct peer *peer = &c->peers[rank];
    const struct rank_slot *slot = slot_of(c, rank);
    uint32_t state = atomic_load(&slot->state);
    pid_t pid = atomic_load(&slot->pid);
    *missing = state == RANK_ABSENT;
    if (state == RANK_GAVE_UP)
        return fail(flagcxRemoteError, "flagcxCommInitRank: rank %d of %d gave up: rank %d (process %d) failed while "
                                       "joining",
                    c->rank, c->nranks, rank, (int)pid);
    if (pid != 0 && peer->watch.pid == 0)
        start_watching(c, rank, pid, state == RANK_ABSENT ? 0 : atomic_load(&slot->start_time));
    /* What became of a rank after all had joined is a matter of the calls that come. */
    bool is_past_joining = state != RANK_ABSENT && state != RANK_JOINED;
    if (pid == 0 || is_past_joining || peer->same_process || !watch_gone(&peer->watch))
        return flagcxSuccess;
    if (atomic_load(&slot->state) != state)
        return flagcxSuccess;
    return fail(flagcxRemoteError, "flagcxCommInitRank: rank %d of %d gave up: rank %d (process %d) died while joining",
                c->rank, c->nranks, rank, (int)pid);
}

static void list_missing(const struct communicator *c, char *text, size_t room)
{
    size_t used = 0;
    text[0] = '\0';
    for (int rank = 0; rank < c->nranks && used + 8 < room; rank++)
        if (atomic_load(&slot_of(c, rank)->state) == RANK_ABSENT)
            used += (size_t)snprintf(text + used, room - used, "%s%d", used > 0 ? ", " : "", rank);
}

static flagcxResult_t look_at_all(struct communicator *c, const struct watch *creator, bool *all_here)
{
    int missing_ranks = 0;
    for (int rank = 0; rank < c->nranks; rank++) {
        bool missing = false;
        flagcxResult_t result = rank == c->rank ? flagcxSuccess : look_at(c, rank, &missing);
        if (result != flagcxSuccess)
            return result;
        missing_ranks += missing;
    }
    *all_here = missing_ranks == 0;
    if (*all_here || creator->pid == getpid() || !watch_gone(creator))
        return flagcxSuccess;
    char missing[128];
    list_missing(c, missing, sizeof missing);
    /* The last one may have come while the process was ending. */
    if (missing[0] == '\0')
        return flagcxSuccess;
    return fail(flagcxRemoteError, "flagcxCommInitRank: rank %d of %d gave up: the process that made the unique id "
                                   "has ended before rank %s came; it must live until all ranks have joined",
                c->rank, c->nranks, missing);
}

static void say_who_is_missing(const struct communicator *c)
{
    char missing[128];
    list_missing(c, missing, sizeof missing);
    tell("rank %d of %d has waited %d s in flagcxCommInitRank for rank %s", c->rank, c->nranks, SECONDS_UNTIL_NOTICE,
         missing);
}

static flagcxResult_t wait_for_all(struct communicator *c, const struct watch *creator)
{
    struct segment_header *header = segment_header(c->segment);
    time_t start = time(NULL);
    bool said = false, all_here = false;
    for (;;) {
        uint32_t joining = atomic_load(&header->joining);
        flagcxResult_t result = look_at_all(c, creator, &all_here);
        if (result != flagcxSuccess || all_here)
            return result;
        if (!said && time(NULL) - start >= SECONDS_UNTIL_NOTICE) {
            say_who_is_missing(c);
            said = true;
        }
        futex_sleep(&header->joining, joining, JOIN_LOOKOUT_NANOSECONDS);
    }
}

static flagcxResult_t meet(struct communicator *c, const struct invitation *invitation)
{
    struct watch creator;
    flagcxResult_t result = take_slot(c);
    if (result != flagcxSuccess)
        return result;
    watch_open(&creator, invitation->creator, invitation->creator_start_time);
    result = wait_for_all(c, &creator);
    watch_close(&creator);
    if (result == flagcxSuccess) {
        atomic_store(&segment_header(c->segment)->complete, 1);
    } else {
        atomic_store(&slot_of(c, c->rank)->state, RANK_GAVE_UP);
        say_that_joining_changed(c);
    }
    /* Come or failed: nobody joins by this id after this. */
    segment_forget_creation(invitation->nonce);
    return result;
}

static struct communicator *new_communicator(struct segment *segment, int nranks, int rank)
{
    struct communicator *c = calloc(1, sizeof *c + (size_t)nranks * sizeof c->peers[0]);
    if (c == NULL)
        return NULL;
    c->segment = segment;
    c->nranks = nranks;
    c->rank = rank;
    c->longest_spin = longest_spin_for(nranks);
    c->spin = c->longest_spin;
    for (int i = 0; i < nranks; i++)
        c->peers[i].watch.descriptor = -1;
    return c;
}

static flagcxResult_t join_segment(struct segment *segment, const struct invitation *invitation, int nranks, int rank,
                                   struct flagcxComm **comm)
{
    struct communicator *c = new_communicator(segment, nranks, rank);
    struct flagcxComm *handle = new_handle(nranks, rank);
    flagcxResult_t result = flagcxSystemError;
    if (c == NULL || handle == NULL)
        fail(result, "flagcxCommInitRank: out of memory");
    else
        result = meet(c, invitation);
    if (result != flagcxSuccess) {
        for (int i = 0; c != NULL && i < nranks; i++)
            watch_close(&c->peers[i].watch);
        free(c);
        free(handle);
        return result;
    }
    c->handle = handle;
    handle->live = c;
    keep_handle(handle);
    *comm = handle;
    return flagcxSuccess;
}

flagcxResult_t communicator_join(const flagcxUniqueId *id, int nranks, int rank, struct flagcxComm **comm)
{
    struct invitation invitation;
    struct segment *segment;
    if (nranks > MAXIMUM_RANKS)
        return fail(flagcxInvalidArgument, "flagcxCommInitRank: nranks=%d, hostcx connects at most %d ranks", nranks,
                    MAXIMUM_RANKS);
    flagcxResult_t result = invitation_read(id, &invitation);
    if (result == flagcxSuccess)
        result = segment_open(&invitation, nranks, &segment);
    if (result != flagcxSuccess)
        return result;
    result = join_segment(segment, &invitation, nranks, rank, comm);
    if (result != flagcxSuccess)
        segment_release(segment);
    return result;
}
