/* Every collective, type and operation, in and out of place, against plain arithmetic over the ranks' values. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"
#include "walks.h"

/* One point of the matrix. */
struct point {
    flagcxDataType_t datatype;
    flagcxRedOp_t op;
    size_t count;
    int root;
    bool in_place;
};

static bool is_integer(flagcxDataType_t datatype) { return datatype <= flagcxUint64; }

/* What the type can express of a quotient; sums and products of the walk's values are exact. */
static double tolerance(flagcxDataType_t datatype)
{
    static const double of_floats[] = {0x1p-11, 0x1p-24, 0x1p-53, 0x1p-8};
    return is_integer(datatype) ? 0 : of_floats[datatype - flagcxFloat16];
}

static double reduced(const struct point *p, int nranks, size_t index)
{
    double result = value_at(0, index, p->datatype);
    for (int rank = 1; rank < nranks; rank++) {
        double value = value_at(rank, index, p->datatype);
        switch (p->op) {
        case flagcxProd: result *= value; break;
        case flagcxMax: result = fmax(result, value); break;
        case flagcxMin: result = fmin(result, value); break;
        default: result += value; break;
        }
    }
    if (p->op != flagcxAvg)
        return result;
    return is_integer(p->datatype) ? trunc(result / nranks) : result / nranks;
}

static void check_reduced(const struct rank *r, const struct point *p, const void *found, size_t start, const char *what)
{
    for (size_t i = 0; i < p->count; i++) {
        double wanted = reduced(p, r->nranks, start + i);
        double is = load(found, i, p->datatype);
        if (fabs(is - wanted) <= fabs(wanted) * tolerance(p->datatype))
            continue;
        CHECK_SAYING(false, "%s type %d op %d count %zu root %d%s, rank %d of %d: element %zu is %g, not %g", what,
                     p->datatype, p->op, p->count, p->root, p->in_place ? " in place" : "", r->rank, r->nranks, i, is,
                     wanted);
        return;
    }
    CHECK(true);
}

/* count elements of found, from place on, are those of a rank from index start on. */
static void check_values(const struct rank *r, const struct point *p, const void *found, size_t place, size_t count,
                         int of_rank, size_t start, const char *what)
{
    for (size_t i = 0; i < count; i++) {
        double wanted = value_at(of_rank, start + i, p->datatype);
        double is = load(found, place + i, p->datatype);
        if (is == wanted)
            continue;
        CHECK_SAYING(false, "%s type %d count %zu root %d%s, rank %d of %d: element %zu is %g, not %g", what,
                     p->datatype, p->count, p->root, p->in_place ? " in place" : "", r->rank, r->nranks, place + i, is,
                     wanted);
        return;
    }
    CHECK(true);
}

static char *at(void *buffer, size_t index, flagcxDataType_t datatype)
{
    return (char *)buffer + index * getFlagcxDataTypeSize(datatype);
}

static void all_reduce(struct rank *r, const struct point *p)
{
    void *send = new_values(r->rank, 0, p->count, p->datatype);
    void *receive = p->in_place ? send : new_buffer(p->count, p->datatype);
    OK(flagcxAllReduce(send, receive, p->count, p->datatype, p->op, r->comm, r->stream));
    check_reduced(r, p, receive, 0, "AllReduce");
    if (!p->in_place) {
        check_values(r, p, send, 0, p->count, r->rank, 0, "AllReduce's input");
        free(receive);
    }
    free(send);
}

static void reduce(struct rank *r, const struct point *p)
{
    bool is_root = r->rank == p->root;
    void *send = new_values(r->rank, 0, p->count, p->datatype);
    void *receive = !is_root ? NULL : p->in_place ? send : new_buffer(p->count, p->datatype);
    OK(flagcxReduce(send, receive, p->count, p->datatype, p->op, p->root, r->comm, r->stream));
    if (is_root)
        check_reduced(r, p, receive, 0, "Reduce");
    else
        check_values(r, p, send, 0, p->count, r->rank, 0, "Reduce's input");
    if (receive != send)
        free(receive);
    free(send);
}

static void reduce_scatter(struct rank *r, const struct point *p)
{
    size_t start = (size_t)r->rank * p->count;
    void *send = new_values(r->rank, 0, p->count * (size_t)r->nranks, p->datatype);
    void *receive = p->in_place ? at(send, start, p->datatype) : new_buffer(p->count, p->datatype);
    OK(flagcxReduceScatter(send, receive, p->count, p->datatype, p->op, r->comm, r->stream));
    check_reduced(r, p, receive, start, "ReduceScatter");
    if (!p->in_place)
        free(receive);
    free(send);
}

static void broadcast(struct rank *r, const struct point *p)
{
    void *receive = new_values(r->rank, 0, p->count, p->datatype);
    bool apart = !p->in_place && r->rank == p->root;
    void *send = apart ? new_values(r->rank, 0, p->count, p->datatype) : r->rank == p->root ? receive : NULL;
    OK(flagcxBroadcast(send, receive, p->count, p->datatype, p->root, r->comm, r->stream));
    check_values(r, p, receive, 0, p->count, p->root, 0, "Broadcast");
    if (apart)
        free(send);
    free(receive);
}

static void all_gather(struct rank *r, const struct point *p)
{
    size_t start = (size_t)r->rank * p->count;
    void *receive = new_buffer(p->count * (size_t)r->nranks, p->datatype);
    void *values = new_values(r->rank, 0, p->count, p->datatype);
    if (p->in_place && p->count > 0)
        memcpy(at(receive, start, p->datatype), values, p->count * getFlagcxDataTypeSize(p->datatype));
    void *send = p->in_place ? at(receive, start, p->datatype) : values;
    OK(flagcxAllGather(send, receive, p->count, p->datatype, r->comm, r->stream));
    for (int rank = 0; rank < r->nranks; rank++)
        check_values(r, p, receive, (size_t)rank * p->count, p->count, rank, 0, "AllGather");
    free(values);
    free(receive);
}

static void gather(struct rank *r, const struct point *p)
{
    bool is_root = r->rank == p->root;
    size_t start = (size_t)r->rank * p->count;
    void *receive = is_root ? new_buffer(p->count * (size_t)r->nranks, p->datatype) : NULL;
    void *values = new_values(r->rank, 0, p->count, p->datatype);
    void *send = is_root && p->in_place ? at(receive, start, p->datatype) : values;
    if (send != values && p->count > 0)
        memcpy(send, values, p->count * getFlagcxDataTypeSize(p->datatype));
    OK(flagcxGather(send, receive, p->count, p->datatype, p->root, r->comm, r->stream));
    for (int rank = 0; is_root && rank < r->nranks; rank++)
        check_values(r, p, receive, (size_t)rank * p->count, p->count, rank, 0, "Gather");
    free(values);
    free(receive);
}

static void scatter(struct rank *r, const struct point *p)
{
    bool is_root = r->rank == p->root;
    size_t start = (size_t)r->rank * p->count;
    void *send = is_root ? new_values(r->rank, 0, p->count * (size_t)r->nranks, p->datatype) : NULL;
    void *receive = is_root && p->in_place ? at(send, start, p->datatype) : new_buffer(p->count, p->datatype);
    OK(flagcxScatter(send, receive, p->count, p->datatype, p->root, r->comm, r->stream));
    check_values(r, p, receive, 0, p->count, p->root, start, "Scatter");
    if (!is_root || !p->in_place)
        free(receive);
    free(send);
}

static void all_to_all(struct rank *r, const struct point *p)
{
    size_t all = p->count * (size_t)r->nranks;
    void *send = new_values(r->rank, 0, all, p->datatype);
    void *receive = p->in_place ? send : new_buffer(all, p->datatype);
    OK(flagcxAlltoAll(send, receive, p->count, p->datatype, r->comm, r->stream));
    for (int rank = 0; rank < r->nranks; rank++)
        check_values(r, p, receive, (size_t)rank * p->count, p->count, rank, (size_t)r->rank * p->count, "AlltoAll");
    if (!p->in_place)
        free(receive);
    free(send);
}

/* From one rank to another, so that some pairs exchange nothing and both directions differ. */
static size_t uneven(const struct point *p, int from, int to)
{
    if (p->in_place)
        return p->count * (size_t)((from + to) % 3);
    return p->count * (size_t)((from + 2 * to) % 3);
}

static void all_to_all_v(struct rank *r, const struct point *p)
{
    size_t give[MOST_RANKS], give_at[MOST_RANKS], get[MOST_RANKS], get_at[MOST_RANKS], gives = 0, gets = 0;
    for (int rank = 0; rank < r->nranks; rank++) {
        give[rank] = uneven(p, r->rank, rank);
        get[rank] = uneven(p, rank, r->rank);
        /* One element is left out before each block. */
        give_at[rank] = gives + 1;
        get_at[rank] = gets + 1;
        gives += give[rank] + 1;
        gets += get[rank] + 1;
    }
    void *send = new_values(r->rank, 0, gives, p->datatype);
    void *receive = p->in_place ? send : new_buffer(gets, p->datatype);
    OK(flagcxAlltoAllv(send, give, give_at, receive, get, get_at, p->datatype, r->comm, r->stream));
    for (int rank = 0; rank < r->nranks; rank++) {
        size_t their_start = 1;
        for (int before = 0; before < r->rank; before++)
            their_start += uneven(p, rank, before) + 1;
        check_values(r, p, receive, get_at[rank], get[rank], rank, their_start, "AlltoAllv");
    }
    if (!p->in_place)
        free(receive);
    free(send);
}

typedef void (*walk_one)(struct rank *r, const struct point *p);

static void walk_roots(struct rank *r, struct point p, walk_one one)
{
    for (p.root = 0; p.root < r->nranks; p.root++)
        one(r, &p);
}

static void walk_point(struct rank *r, struct point p)
{
    static const walk_one with_root[] = {broadcast, gather, scatter};
    static const walk_one without_root[] = {all_gather, all_to_all, all_to_all_v};
    for (p.op = 0; p.op < flagcxNumRedOps; p.op++) {
        all_reduce(r, &p);
        reduce_scatter(r, &p);
        walk_roots(r, p, reduce);
    }
    p.op = flagcxSum;
    for (size_t i = 0; i < sizeof with_root / sizeof with_root[0]; i++)
        walk_roots(r, p, with_root[i]);
    for (size_t i = 0; i < sizeof without_root / sizeof without_root[0]; i++)
        without_root[i](r, &p);
    OK(flagcxBarrier(r->comm, r->stream));
}

/* One type per width and kind of arithmetic. */
static bool is_representative(int datatype)
{
    return datatype == flagcxUint8 || datatype == flagcxFloat16 || datatype == flagcxFloat32 ||
           datatype == flagcxInt64 || datatype == flagcxBfloat16;
}

static void walk_small(struct rank *r)
{
    static const size_t counts[] = {0, 1, 7, 4096};
    for (int datatype = 0; datatype < flagcxNumTypes; datatype++)
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
            for (int in_place = 0; in_place < 2; in_place++)
                if (!is_slow || counts[i] < 4096 || (is_representative(datatype) && in_place == datatype % 2))
                    walk_point(r, (struct point){.datatype = (flagcxDataType_t)datatype, .count = counts[i], .in_place = in_place != 0});
}

/* A million elements go through every stage and ring several times. */
static void walk_large(struct rank *r)
{
    for (int in_place = 0; in_place < 2; in_place++) {
        struct point p = {.datatype = flagcxBfloat16, .count = 1000000, .in_place = in_place != 0, .root = 1};
        all_reduce(r, &p);
        broadcast(r, &p);
        all_to_all(r, &p);
        if (is_slow)
            continue;
        reduce_scatter(r, &p);
        reduce(r, &p);
        all_gather(r, &p);
        gather(r, &p);
        scatter(r, &p);
        all_to_all_v(r, &p);
        p.datatype = flagcxFloat32;
        p.op = flagcxMax;
        all_reduce(r, &p);
    }
}

void walk_collectives(int nranks)
{
    run_ranks(nranks, walk_small, NULL);
    run_ranks(nranks, walk_large, NULL);
    run_ranks(1, walk_small, NULL);
}

static void planted(struct rank *r)
{
    /* Larger than one page of the heap's reserve, so that the byte behind it is nobody's. */
    all_reduce(r, &(struct point){.datatype = flagcxFloat32, .count = 4096});
}

void walk_planted(int nranks) { run_ranks(nranks, planted, NULL); }
