/* Ranks that do not make the same call: each that can see it is told, and none is given another call's data. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"
#include "walks.h"

enum { FEW = 8, MANY = 600000 };

/* What one rank calls; even ranks make the first of a pair, odd ranks the second. */
struct call {
    flagcxResult_t (*make)(struct rank *r, const struct call *call, float *values);
    size_t count;
    flagcxDataType_t datatype;
    int root;
};

/* Roots other than a certain rank. */
enum { OWN = -1, NEXT = -2 };

static int root_of(const struct rank *r, const struct call *call)
{
    if (call->root == OWN)
        return r->rank;
    return call->root == NEXT ? (r->rank + 1) % r->nranks : call->root;
}

static flagcxResult_t all_reduce(struct rank *r, const struct call *call, float *values)
{
    return flagcxAllReduce(values, values, call->count, call->datatype, flagcxSum, r->comm, r->stream);
}

static flagcxResult_t all_reduce_max(struct rank *r, const struct call *call, float *values)
{
    return flagcxAllReduce(values, values, call->count, call->datatype, flagcxMax, r->comm, r->stream);
}

static flagcxResult_t broadcast(struct rank *r, const struct call *call, float *values)
{
    return flagcxBroadcast(values, values, call->count, call->datatype, root_of(r, call), r->comm, r->stream);
}

static flagcxResult_t reduce(struct rank *r, const struct call *call, float *values)
{
    return flagcxReduce(values, values, call->count, call->datatype, flagcxSum, root_of(r, call), r->comm, r->stream);
}

static flagcxResult_t barrier(struct rank *r, const struct call *call, float *values)
{
    (void)call;
    (void)values;
    return flagcxBarrier(r->comm, r->stream);
}

struct pair {
    const char *name;
    struct call calls[2];
};

static const struct pair collectives[] = {
    {"counts", {{all_reduce, FEW, flagcxFloat32, 0}, {all_reduce, FEW / 2, flagcxFloat32, 0}}},
    {"operations", {{all_reduce, FEW, flagcxFloat32, 0}, {all_reduce_max, FEW, flagcxFloat32, 0}}},
    {"types", {{all_reduce, FEW, flagcxFloat32, 0}, {all_reduce, FEW, flagcxInt32, 0}}},
    {"broadcast from oneself", {{broadcast, FEW, flagcxFloat32, OWN}, {broadcast, FEW, flagcxFloat32, OWN}}},
    {"broadcast from the next", {{broadcast, FEW, flagcxFloat32, NEXT}, {broadcast, FEW, flagcxFloat32, NEXT}}},
    {"reduce to oneself", {{reduce, FEW, flagcxFloat32, OWN}, {reduce, FEW, flagcxFloat32, OWN}}},
    {"reduce to the next", {{reduce, FEW, flagcxFloat32, NEXT}, {reduce, FEW, flagcxFloat32, NEXT}}},
    {"broadcast and reduce", {{broadcast, FEW, flagcxFloat32, 0}, {reduce, FEW / 2, flagcxFloat32, 0}}},
    {"broadcast and barrier", {{broadcast, FEW, flagcxFloat32, 0}, {barrier, 0, flagcxInt8, 0}}},
    {"large broadcasts", {{broadcast, MANY, flagcxFloat32, OWN}, {broadcast, MANY, flagcxFloat32, OWN}}},
    {"large reductions", {{reduce, MANY, flagcxFloat32, NEXT}, {reduce, MANY, flagcxFloat32, NEXT}}},
    {"large broadcast, small reduce", {{broadcast, MANY, flagcxFloat32, 0}, {reduce, FEW, flagcxFloat32, 0}}},
    {"large reduce, small broadcast", {{broadcast, FEW, flagcxFloat32, 0}, {reduce, MANY, flagcxFloat32, 0}}},
};

/* Two ranks both see it. Of more, one may hear first that another has given up. */
static void expect_disagreement(struct rank *r, flagcxResult_t result, const char *name)
{
    bool told = result == flagcxInvalidUsage || (r->nranks > 2 && result == flagcxRemoteError);
    CHECK_SAYING(told, "%s: rank %d of %d got %d", name, r->rank, r->nranks, (int)result);
    if (told)
        expect_async_error(r, result, result == flagcxInvalidUsage ? "same call" : "rank");
}

static void call_different_collectives(struct rank *r)
{
    const struct pair *pair = r->argument;
    const struct call *call = &pair->calls[r->rank % 2];
    float *values = calloc(MANY, sizeof *values);
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    /* The stages have been in use, and are so from the middle on. */
    for (int i = 0; i < 6; i++)
        OK(flagcxBroadcast(values, values, FEW, flagcxFloat32, i % r->nranks, r->comm, r->stream));
    expect_disagreement(r, call->make(r, call, values), pair->name);
    OK(flagcxCommDestroy(r->comm));
    free(values);
}

static void disagree_on_bytes(struct rank *r)
{
    float values[8] = {1};
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    if (r->rank == 0)
        OK(flagcxSend(values, 8, flagcxFloat32, 1, r->comm, r->stream));
    if (r->rank == 1) {
        CHECK_RESULT(flagcxRecv(values, 4, flagcxFloat32, 0, r->comm, r->stream), flagcxInvalidUsage);
        expect_async_error(r, flagcxInvalidUsage, "32 bytes");
    }
    OK(flagcxCommDestroy(r->comm));
}

/* Equal bytes of another type are another message. */
static void disagree_on_type(struct rank *r)
{
    float values[8] = {1};
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    if (r->rank == 0)
        OK(flagcxSend(values, 8, flagcxFloat32, 1, r->comm, r->stream));
    if (r->rank == 1) {
        CHECK_RESULT(flagcxRecv(values, 8, flagcxInt32, 0, r->comm, r->stream), flagcxInvalidUsage);
        expect_async_error(r, flagcxInvalidUsage, "float32");
        CHECK(values[0] == 1);
    }
    OK(flagcxCommDestroy(r->comm));
}

static void disagree_with_oneself(struct rank *r)
{
    float values[8] = {1}, others[8] = {2};
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    OK(flagcxGroupStart(r->comm));
    OK(flagcxSend(values, 8, flagcxFloat32, r->rank, r->comm, r->stream));
    OK(flagcxRecv(others, 8, flagcxInt32, r->rank, r->comm, r->stream));
    CHECK_RESULT(flagcxGroupEnd(r->comm), flagcxInvalidUsage);
    CHECK(others[0] == 2);
    OK(flagcxBarrier(r->comm, r->stream));
    OK(flagcxCommDestroy(r->comm));
}

/* Without a receiver a gather ends well everywhere; what lies in the rings must not pass for the next one. */
static void gather_to_the_next(struct rank *r)
{
    float send[FEW] = {1}, receive[FEW * MOST_RANKS] = {0};
    int next = (r->rank + 1) % r->nranks, before = (r->rank + r->nranks - 1) % r->nranks;
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    if (r->nranks == 2) {
        OK(flagcxGather(send, receive, FEW, flagcxFloat32, next, r->comm, r->stream));
        OK(flagcxBarrier(r->comm, r->stream));
        send[0] = 7;
        CHECK_RESULT(flagcxGather(send, receive, FEW, flagcxFloat32, 0, r->comm, r->stream), flagcxInvalidUsage);
        expect_async_error(r, flagcxInvalidUsage, "same call");
    } else {
        OK(flagcxGather(send, receive, FEW, flagcxFloat32, next, r->comm, r->stream));
        flagcxResult_t result = flagcxRecv(receive, FEW, flagcxFloat32, before, r->comm, r->stream);
        CHECK_SAYING(result == flagcxInvalidUsage || result == flagcxRemoteError, "a gather's message gave %d", result);
    }
    CHECK(receive[0] == 0 && receive[FEW] == 0);
    OK(flagcxCommDestroy(r->comm));
}

/* The receiver is behind by an exchange: the message says which one it is of. */
static void scatter_twice(struct rank *r)
{
    float send[FEW * MOST_RANKS] = {1}, receive[FEW] = {0};
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    if (r->rank == 0) {
        OK(flagcxAlltoAllv(NULL, (size_t[MOST_RANKS]){0}, (size_t[MOST_RANKS]){0}, NULL, (size_t[MOST_RANKS]){0},
                           (size_t[MOST_RANKS]){0}, flagcxFloat32, r->comm, r->stream));
        OK(flagcxScatter(send, receive, FEW, flagcxFloat32, 0, r->comm, r->stream));
    }
    if (r->rank == 1) {
        CHECK_RESULT(flagcxScatter(NULL, receive, FEW, flagcxFloat32, 0, r->comm, r->stream), flagcxInvalidUsage);
        expect_async_error(r, flagcxInvalidUsage, "exchange 2");
        CHECK(receive[0] == 0);
    }
    OK(flagcxCommDestroy(r->comm));
}

static void gather_what_was_sent(struct rank *r)
{
    float send[FEW] = {1}, receive[FEW * MOST_RANKS] = {0};
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    if (r->rank != 0) {
        OK(flagcxSend(send, FEW, flagcxFloat32, 0, r->comm, r->stream));
    } else {
        CHECK_RESULT(flagcxGather(send, receive, FEW, flagcxFloat32, 0, r->comm, r->stream), flagcxInvalidUsage);
        expect_async_error(r, flagcxInvalidUsage, "flagcxSend");
    }
    OK(flagcxCommDestroy(r->comm));
}

void walk_disagreement(int nranks)
{
    for (size_t i = 0; i < sizeof collectives / sizeof collectives[0]; i++) {
        name_next_case(collectives[i].name);
        run_ranks_bare(nranks, call_different_collectives, &collectives[i]);
    }
    run_ranks_bare(nranks, disagree_on_bytes, NULL);
    run_ranks_bare(nranks, disagree_on_type, NULL);
    run_ranks_bare(nranks, disagree_with_oneself, NULL);
    run_ranks_bare(nranks, gather_to_the_next, NULL);
    run_ranks_bare(nranks, scatter_twice, NULL);
    run_ranks_bare(nranks, gather_what_was_sent, NULL);
}
