/* What goes wrong between living ranks: abort, leaving, disagreement, and shared memory that somebody damaged. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "steps.h"
#include "support.h"
#include "walks.h"

static void *abort_soon(void *argument)
{
    /* Long enough for the other thread to fall asleep in its call. */
    usleep(200 * 1000);
    OK(flagcxCommAbort(argument));
    return NULL;
}

/* Rank 0 waits for something that never comes; another thread aborts. The others are told. */
static void abort_a_wait(struct rank *r)
{
    float value = 1;
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    if (r->rank == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, abort_soon, r->comm) == 0);
        CHECK_RESULT(flagcxRecv(&value, 1, flagcxFloat32, 1, r->comm, r->stream), flagcxInternalError);
        pthread_join(thread, NULL);
        CHECK_RESULT(flagcxCommDestroy(r->comm), flagcxInvalidArgument);
        CHECK_RESULT(flagcxCommAbort(r->comm), flagcxInvalidArgument);
        return;
    }
    CHECK_RESULT(flagcxRecv(&value, 1, flagcxFloat32, 0, r->comm, r->stream), flagcxRemoteError);
    expect_async_error(r, flagcxRemoteError, "rank");
    OK(flagcxCommDestroy(r->comm));
}

/* A rank that has done its part may go; one that is still needed is missed. */
static void leave_early(struct rank *r)
{
    float value = 5;
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    if (r->rank == 1) {
        OK(flagcxSend(&value, 1, flagcxFloat32, 0, r->comm, r->stream));
        OK(flagcxCommDestroy(r->comm));
        return;
    }
    if (r->rank == 0) {
        usleep(100 * 1000);
        value = 0;
        OK(flagcxRecv(&value, 1, flagcxFloat32, 1, r->comm, r->stream));
        CHECK(value == 5);
    }
    CHECK_RESULT(flagcxAllReduce(&value, &value, 1, flagcxFloat32, flagcxSum, r->comm, r->stream), flagcxRemoteError);
    expect_async_error(r, flagcxRemoteError, "rank");
    OK(flagcxCommDestroy(r->comm));
}

enum { MESSAGE = 1000 };

/* Ways to damage what rank 0 reads. Each other rank does it to its own slot and rings, instead of making
 * its next call. */
struct damage {
    const char *name;
    void (*damage)(struct communicator *c);
    bool point_to_point;
};

static struct rank_slot *own_slot(struct communicator *c) { return slot_of(c, c->rank); }

/* What rank 0 calls next stands in all stages: nothing but the damaged number is wrong. */
static void sign_all_stages(struct communicator *c)
{
    const struct operation next = {.call = CALL_flagcxAllReduce, .count = 10, .datatype = flagcxInt8};
    for (int stage = 0; stage < STAGES; stage++)
        atomic_store(&own_slot(c)->signatures[stage], signature_of(&next));
}

static void posted_too_far(struct communicator *c)
{
    sign_all_stages(c);
    atomic_store(&own_slot(c)->posted, c->step + STAGES + 1);
}

static void posted_largest(struct communicator *c) { atomic_store(&own_slot(c)->posted, UINT64_MAX); }

static void finished_too_far(struct communicator *c)
{
    sign_all_stages(c);
    atomic_store(&own_slot(c)->finished, UINT64_MAX);
    atomic_store(&own_slot(c)->posted, c->step + STAGES);
}

static void other_signature(struct communicator *c)
{
    for (int stage = 0; stage < STAGES; stage++)
        atomic_store(&own_slot(c)->signatures[stage], UINT64_MAX);
    atomic_store(&own_slot(c)->posted, c->step + 1);
}

static void strange_state(struct communicator *c) { atomic_store(&own_slot(c)->state, 77777); }

/* The message that rank 0 receives next. */
static struct message_head next_message(void)
{
    const struct operation next = {.call = CALL_flagcxSend, .count = MESSAGE, .datatype = flagcxInt8};
    return (struct message_head){.magic = message_magic, .bytes = MESSAGE, .signature = signature_of(&next)};
}

static void put_message(struct communicator *c, const struct message_head *head, uint64_t written)
{
    memcpy(ring_bytes(c->segment, c->rank, 0), head, sizeof *head);
    atomic_store(&ring_control(c->segment, c->rank, 0)->written, written);
}

static void written_too_far(struct communicator *c)
{
    struct message_head head = next_message();
    put_message(c, &head, c->segment->ring_bytes + CACHE_LINE);
}

static void written_askew(struct communicator *c)
{
    struct message_head head = next_message();
    put_message(c, &head, sizeof head + MESSAGE);
}

static void written_backwards(struct communicator *c)
{
    atomic_store(&ring_control(c->segment, c->rank, 0)->written, UINT64_MAX - 63);
}

static void taken_too_far(struct communicator *c)
{
    atomic_store(&ring_control(c->segment, 0, c->rank)->taken, (uint64_t)1 << 40);
}

static void wrong_magic(struct communicator *c)
{
    struct message_head head = next_message();
    head.magic = UINT64_MAX;
    put_message(c, &head, 2048);
}

static void huge_message(struct communicator *c)
{
    struct message_head head = next_message();
    head.bytes = UINT64_MAX / 2;
    put_message(c, &head, 2048);
}

static void other_call(struct communicator *c)
{
    struct message_head head = next_message();
    head.signature = UINT64_MAX;
    put_message(c, &head, 2048);
}

static void other_exchange(struct communicator *c)
{
    struct message_head head = next_message();
    head.exchange = UINT64_MAX;
    put_message(c, &head, 2048);
}

static const struct damage damages[] = {
    {"posted too far", posted_too_far, false},       {"posted largest", posted_largest, false},
    {"finished too far", finished_too_far, false},   {"other signature", other_signature, false},
    {"strange state", strange_state, false},         {"written too far", written_too_far, true},
    {"written askew", written_askew, true},          {"written backwards", written_backwards, true},
    {"taken too far", taken_too_far, true},          {"wrong magic", wrong_magic, true},
    {"huge message", huge_message, true},            {"other call", other_call, true},
    {"other exchange", other_exchange, true},
};

static flagcxResult_t read_damaged(struct rank *r, const struct damage *damage)
{
    char values[MESSAGE] = {0};
    flagcxResult_t result = flagcxSuccess;
    if (!damage->point_to_point) {
        for (int i = 0; i < STAGES && result == flagcxSuccess; i++)
            result = flagcxAllReduce(values, values, 10, flagcxInt8, flagcxSum, r->comm, r->stream);
        return result;
    }
    result = flagcxSend(values, sizeof values, flagcxInt8, 1, r->comm, r->stream);
    return result != flagcxSuccess ? result : flagcxRecv(values, sizeof values, flagcxInt8, 1, r->comm, r->stream);
}

/* Without the library: all ranks have come here. */
static void meet(int number, int nranks)
{
    atomic_fetch_add(&record->numbers[number], 1);
    while (atomic_load(&record->numbers[number]) < (uint64_t)nranks)
        usleep(1000);
}

/* The others damage, rank 0 reads: an error, at once, and no crash. */
static void read_what_is_damaged(struct rank *r)
{
    const struct damage *damage = r->argument;
    float value = 1;
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    for (int i = 0; i < STAGES + 1; i++)
        OK(flagcxAllReduce(&value, &value, 1, flagcxFloat32, flagcxMax, r->comm, r->stream));
    OK(flagcxBarrier(r->comm, r->stream));
    /* First all are through the barrier, then all damage is done, then it is read. */
    meet(0, r->nranks);
    if (r->rank != 0)
        damage->damage(r->comm->live);
    meet(1, r->nranks);
    if (r->rank == 0) {
        flagcxResult_t result = read_damaged(r, damage);
        CHECK_SAYING(result != flagcxSuccess, "%s: the damage was not noticed", damage->name);
        expect_async_error(r, result, "this communicator cannot be used");
    }
    /* Nobody leaves before rank 0 has seen the damage. */
    flagcxResult_t error = flagcxSuccess;
    while (r->rank != 0 && error == flagcxSuccess) {
        OK(flagcxCommGetAsyncError(r->comm, &error));
        usleep(1000);
    }
    OK(flagcxCommDestroy(r->comm));
}

void walk_failures(int nranks)
{
    run_ranks_bare(nranks, abort_a_wait, NULL);
    run_ranks_bare(nranks, leave_early, NULL);
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        atomic_store(&record->numbers[0], 0);
        atomic_store(&record->numbers[1], 0);
        name_next_case(damages[i].name);
        run_ranks_bare(nranks, read_what_is_damaged, &damages[i]);
    }
}
