/* Point to point, groups in all their forms, and several communicators in one process. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"
#include "walks.h"

/* More than a ring holds, so that a send needs its receiver. */
enum { MORE_THAN_A_RING = 700001, FITS_INTO_A_RING = 1000 };

static bool holds(const void *buffer, int rank, size_t start, size_t count, flagcxDataType_t datatype)
{
    for (size_t i = 0; i < count; i++)
        if (load(buffer, i, datatype) != value_at(rank, start + i, datatype))
            return false;
    return true;
}

/* All ranks send to all at once, themselves too, twice each, more than the rings hold. */
static void all_pairs(struct rank *r, size_t count)
{
    void *sends[2], *receives[MOST_RANKS][2];
    for (int k = 0; k < 2; k++)
        sends[k] = new_values(r->rank, (size_t)k, count, flagcxInt32);
    OK(flagcxGroupStart(r->comm));
    for (int peer = 0; peer < r->nranks; peer++)
        for (int k = 0; k < 2; k++) {
            receives[peer][k] = new_buffer(count, flagcxInt32);
            OK(flagcxSend(sends[k], count, flagcxInt32, peer, r->comm, r->stream));
            OK(flagcxRecv(receives[peer][k], count, flagcxInt32, peer, r->comm, r->stream));
        }
    OK(flagcxGroupEnd(r->comm));
    for (int peer = 0; peer < r->nranks; peer++)
        for (int k = 0; k < 2; k++) {
            CHECK(holds(receives[peer][k], peer, (size_t)k, count, flagcxInt32));
            free(receives[peer][k]);
        }
    free(sends[0]);
    free(sends[1]);
}

/* A send that fits into the ring returns before its receiver has come. */
static void send_first(struct rank *r)
{
    int right = (r->rank + 1) % r->nranks, left = (r->rank + r->nranks - 1) % r->nranks;
    void *send = new_values(r->rank, 0, FITS_INTO_A_RING, flagcxFloat64);
    void *receive = new_buffer(FITS_INTO_A_RING, flagcxFloat64);
    OK(flagcxSend(send, FITS_INTO_A_RING, flagcxFloat64, right, r->comm, r->stream));
    /* The data has left: what happens to the buffer now is nobody's concern. */
    memset(send, 0, FITS_INTO_A_RING * sizeof(double));
    OK(flagcxRecv(receive, FITS_INTO_A_RING, flagcxFloat64, left, r->comm, r->stream));
    CHECK(holds(receive, left, 0, FITS_INTO_A_RING, flagcxFloat64));
    free(send);
    free(receive);
}

/* Long messages, one direction at a time, without a group. */
static void long_message(struct rank *r)
{
    if (r->rank > 1)
        return;
    for (int sender = 0; sender < 2; sender++) {
        if (r->rank == sender) {
            void *send = new_values(r->rank, 3, MORE_THAN_A_RING, flagcxUint8);
            OK(flagcxSend(send, MORE_THAN_A_RING, flagcxUint8, 1 - sender, r->comm, r->stream));
            free(send);
            continue;
        }
        void *receive = new_buffer(MORE_THAN_A_RING, flagcxUint8);
        OK(flagcxRecv(receive, MORE_THAN_A_RING, flagcxUint8, sender, r->comm, r->stream));
        CHECK(holds(receive, sender, 3, MORE_THAN_A_RING, flagcxUint8));
        free(receive);
    }
}

static void nested_groups(struct rank *r)
{
    int right = (r->rank + 1) % r->nranks, left = (r->rank + r->nranks - 1) % r->nranks;
    void *sum = new_values(r->rank, 0, 100, flagcxInt64), *send = new_values(r->rank, 9, 50, flagcxInt8);
    void *receive = new_buffer(50, flagcxInt8), *all = new_buffer((size_t)r->nranks * 50, flagcxInt8);
    double before = load(sum, 0, flagcxInt64), wanted = 0;
    OK(flagcxGroupStart(NULL));
    OK(flagcxAllReduce(sum, sum, 100, flagcxInt64, flagcxSum, r->comm, r->stream));
    OK(flagcxGroupStart(r->comm));
    OK(flagcxSend(send, 50, flagcxInt8, right, r->comm, r->stream));
    OK(flagcxRecv(receive, 50, flagcxInt8, left, r->comm, r->stream));
    OK(flagcxGroupEnd(r->comm));
    /* Nothing starts before the outermost end. */
    CHECK(load(sum, 0, flagcxInt64) == before);
    OK(flagcxAllGather(send, all, 50, flagcxInt8, r->comm, r->stream));
    OK(flagcxBarrier(r->comm, r->stream));
    OK(flagcxGroupEnd(NULL));
    for (int rank = 0; rank < r->nranks; rank++) {
        wanted += value_at(rank, 0, flagcxInt64);
        CHECK(holds((char *)all + rank * 50, rank, 9, 50, flagcxInt8));
    }
    CHECK(load(sum, 0, flagcxInt64) == wanted);
    CHECK(holds(receive, left, 9, 50, flagcxInt8));
    free(sum);
    free(send);
    free(receive);
    free(all);
}

static void empty_things(struct rank *r)
{
    int right = (r->rank + 1) % r->nranks, left = (r->rank + r->nranks - 1) % r->nranks;
    OK(flagcxGroupStart(NULL));
    OK(flagcxGroupEnd(NULL));
    OK(flagcxSend(NULL, 0, flagcxFloat32, right, r->comm, r->stream));
    OK(flagcxRecv(NULL, 0, flagcxFloat32, left, r->comm, r->stream));
    /* Of a collective without elements nobody waits for anybody: only one rank calls it. */
    if (r->rank == 0)
        OK(flagcxAllReduce(NULL, NULL, 0, flagcxFloat32, flagcxSum, r->comm, r->stream));
}

/* An error within a group: nothing of the group is started, and the end says so. */
static void failing_group(struct rank *r)
{
    float value = 1;
    OK(flagcxGroupStart(r->comm));
    OK(flagcxAllReduce(&value, &value, 1, flagcxFloat32, flagcxSum, r->comm, r->stream));
    CHECK_RESULT(flagcxAllReduce(&value, &value, 1, 99, flagcxSum, r->comm, r->stream), flagcxInvalidArgument);
    CHECK_RESULT(flagcxGroupEnd(r->comm), flagcxInvalidArgument);
    CHECK(value == 1);
    /* A NULL communicator is refused before the group hears of it. */
    OK(flagcxGroupStart(r->comm));
    OK(flagcxAllReduce(&value, &value, 1, flagcxFloat32, flagcxSum, r->comm, r->stream));
    CHECK_RESULT(flagcxAllReduce(&value, &value, 1, flagcxFloat32, flagcxSum, NULL, r->stream), flagcxInternalError);
    OK(flagcxGroupEnd(r->comm));
    CHECK(value == (float)r->nranks);
    CHECK_RESULT(flagcxGroupEnd(NULL), flagcxInvalidUsage);
    /* To itself, without the other half, and with halves that do not fit. */
    CHECK_RESULT(flagcxSend(&value, 1, flagcxFloat32, r->rank, r->comm, r->stream), flagcxInvalidUsage);
    OK(flagcxGroupStart(NULL));
    OK(flagcxSend(&value, 1, flagcxFloat32, r->rank, r->comm, r->stream));
    OK(flagcxRecv(&value, 1, flagcxInt8, r->rank, r->comm, r->stream));
    CHECK_RESULT(flagcxGroupEnd(NULL), flagcxInvalidUsage);
}

static void on_one_communicator(struct rank *r)
{
    all_pairs(r, 1);
    all_pairs(r, 100003);
    send_first(r);
    long_message(r);
    nested_groups(r);
    empty_things(r);
    failing_group(r);
    all_pairs(r, 7);
}

/* Two communicators, the second with the ranks in the other order. */
struct pair {
    flagcxUniqueId first;
    flagcxUniqueId second;
};

static void check_sum_on(flagcxComm_t comm, flagcxStream_t stream, size_t count, int rounds)
{
    int rank = -1, nranks = -1;
    OK(flagcxCommUserRank(comm, &rank));
    OK(flagcxCommCount(comm, &nranks));
    float *values = malloc(count * sizeof *values);
    bool right = true;
    for (int round = 0; round < rounds; round++) {
        for (size_t i = 0; i < count; i++)
            values[i] = (float)(rank + 1) * (float)(round + 1);
        OK(flagcxAllReduce(values, values, count, flagcxFloat32, flagcxSum, comm, stream));
        float wanted = (float)(nranks * (nranks + 1) / 2) * (float)(round + 1);
        for (size_t i = 0; i < count; i++)
            right = right && values[i] == wanted;
    }
    CHECK(right);
    free(values);
}

struct worker {
    flagcxComm_t comm;
    flagcxStream_t stream;
    size_t count;
};

static void *worker_main(void *argument)
{
    const struct worker *worker = argument;
    check_sum_on(worker->comm, worker->stream, worker->count, 50);
    return NULL;
}

/* Every rank names its communicators in its own order within one group. */
static void group_over_two(struct rank *r, flagcxComm_t first, flagcxComm_t second)
{
    float a = 1, b = 2;
    bool swapped = r->rank % 2 != 0;
    OK(flagcxGroupStart(NULL));
    OK(flagcxAllReduce(swapped ? &b : &a, swapped ? &b : &a, 1, flagcxFloat32, flagcxSum, swapped ? second : first,
                       r->stream));
    OK(flagcxAllReduce(swapped ? &a : &b, swapped ? &a : &b, 1, flagcxFloat32, flagcxSum, swapped ? first : second,
                       r->stream));
    OK(flagcxGroupEnd(NULL));
    CHECK(a == (float)r->nranks && b == 2 * (float)r->nranks);
}

static void on_two_communicators(struct rank *r)
{
    const struct pair *ids = r->argument;
    flagcxUniqueId first_id = ids->first, second_id = ids->second;
    flagcxComm_t first = NULL, second = NULL;
    pthread_t thread;
    OK(flagcxCommInitRank(&first, r->nranks, &first_id, r->rank));
    OK(flagcxCommInitRank(&second, r->nranks, &second_id, r->nranks - 1 - r->rank));
    if (first == NULL || second == NULL)
        return;
    for (int round = 0; round < 5; round++) {
        check_sum_on(first, r->stream, 10, 2);
        check_sum_on(second, r->stream, 20000, 2);
    }
    struct worker worker = {second, r->stream, 30000};
    CHECK(pthread_create(&thread, NULL, worker_main, &worker) == 0);
    check_sum_on(first, r->stream, 500, 50);
    pthread_join(thread, NULL);
    group_over_two(r, first, second);
    OK(flagcxCommDestroy(second));
    check_sum_on(first, r->stream, 3, 1);
    OK(flagcxCommDestroy(first));
}

/* One thread that is both ranks of a communicator: joined from two threads, driven by one. */
struct joiner {
    flagcxUniqueId id;
    flagcxComm_t comm;
};

static void *joiner_main(void *argument)
{
    struct joiner *joiner = argument;
    OK(flagcxCommInitRank(&joiner->comm, 2, &joiner->id, 1));
    return NULL;
}

static void one_thread_two_ranks(void)
{
    struct joiner joiner = {.comm = NULL};
    flagcxComm_t comm = NULL;
    flagcxStream_t stream = new_stream();
    pthread_t thread;
    float mine = 3, theirs = 4;
    OK(flagcxGetUniqueId(&joiner.id));
    flagcxUniqueId id = joiner.id;
    CHECK(pthread_create(&thread, NULL, joiner_main, &joiner) == 0);
    OK(flagcxCommInitRank(&comm, 2, &id, 0));
    pthread_join(thread, NULL);
    OK(flagcxGroupStart(NULL));
    OK(flagcxAllReduce(&mine, &mine, 1, flagcxFloat32, flagcxSum, comm, stream));
    OK(flagcxAllReduce(&theirs, &theirs, 1, flagcxFloat32, flagcxSum, joiner.comm, stream));
    OK(flagcxGroupEnd(NULL));
    CHECK(mine == 7 && theirs == 7);
    OK(flagcxCommDestroy(comm));
    OK(flagcxCommDestroy(joiner.comm));
    free_stream(stream);
}

void walk_groups(int nranks)
{
    struct pair ids;
    run_ranks(nranks, on_one_communicator, NULL);
    OK(flagcxGetUniqueId(&ids.first));
    OK(flagcxGetUniqueId(&ids.second));
    run_ranks_bare(nranks, on_two_communicators, &ids);
    one_thread_two_ranks();
}
