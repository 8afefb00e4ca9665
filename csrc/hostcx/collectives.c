/* The collectives that reduce or that all ranks share: algorithms over steps.
 *
 * Data moves in pieces of at most a stage, whatever its size. Reductions run in the order of the ranks
 * on every rank, so that all get the same bits.
 */
#include <string.h>

#include "operation.h"
#include "planted.h"
#include "reduce.h"
#include "steps.h"

/* Up to here every rank reduces everything: one exchange instead of two. */
enum { ONE_EXCHANGE_BYTES = 32 * 1024 };

/* What all steps of one operation share. */
struct run {
    struct communicator *c;
    const char *send;
    char *receive;
    size_t count;
    size_t size;
    int root;
    uint64_t signature;
    reduction reduce;
    const void *inputs[MAXIMUM_RANKS];
};

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static void copy(char *to, const char *from, size_t bytes)
{
    if (to != from && bytes > 0)
        memcpy(to, from, bytes);
}

/* Waits for the stages of all others; inputs[own rank] is own. */
static flagcxResult_t await_inputs(struct run *run, const char *own, size_t offset_in_stages)
{
    struct communicator *c = run->c;
    for (int rank = 0; rank < c->nranks; rank++) {
        const char *stage;
        if (rank == c->rank) {
            run->inputs[rank] = own;
            continue;
        }
        flagcxResult_t result = step_await(c, rank, run->signature, &stage);
        if (result != flagcxSuccess)
            return result;
        run->inputs[rank] = stage + offset_in_stages;
    }
    return flagcxSuccess;
}

static flagcxResult_t barrier(struct run *run)
{
    char *stage;
    flagcxResult_t result = step_acquire(run->c, run->signature, &stage);
    if (result != flagcxSuccess)
        return result;
    step_post(run->c, run->signature);
    result = await_inputs(run, stage, 0);
    if (result == flagcxSuccess)
        step_finish(run->c);
    return result;
}

/* All ranks show each other everything, and each reduces it. */
static flagcxResult_t all_reduce_at_once(struct run *run)
{
    char *stage;
    size_t bytes = run->count * run->size;
    flagcxResult_t result = step_acquire(run->c, run->signature, &stage);
    if (result != flagcxSuccess)
        return result;
    memcpy(stage, run->send, bytes + PLANTED_EXTRA_BYTES);
    step_post(run->c, run->signature);
    result = await_inputs(run, run->send, 0);
    if (result != flagcxSuccess)
        return result;
    run->reduce(run->receive, run->inputs, run->c->nranks, run->count);
    step_finish(run->c);
    return flagcxSuccess;
}

/* A piece of a buffer, cut into one part per rank. Parts are equal up to the last ones. */
struct piece {
    size_t start;
    size_t length;
    size_t part;
};

static size_t part_start(const struct piece *piece, int rank) { return smaller((size_t)rank * piece->part, piece->length); }

static size_t part_length(const struct piece *piece, int rank)
{
    return smaller(piece->length - part_start(piece, rank), piece->part);
}

/* Elements of a part so that the parts for all others fit into a stage. */
static size_t largest_part(const struct run *run)
{
    size_t bytes = STAGE_BYTES / (size_t)(run->c->nranks - 1);
    return bytes / CACHE_LINE * CACHE_LINE / run->size;
}

static struct piece cut(const struct run *run, size_t start, size_t largest)
{
    size_t n = (size_t)run->c->nranks;
    size_t line = CACHE_LINE / run->size;
    struct piece piece = {.start = start, .length = smaller(run->count - start, largest * n)};
    piece.part = (piece.length + n - 1) / n;
    piece.part = smaller((piece.part + line - 1) / line * line, largest);
    return piece;
}

/* Where the part for one rank lies in the stage of another. */
static size_t place_in_stage(const struct run *run, int of, int reader, size_t part_elements)
{
    size_t place = (size_t)(reader < of ? reader : reader - 1);
    return place * part_elements * run->size;
}

/* Shows each other rank its part of the piece; the parts are stride elements apart in the send buffer. */
static flagcxResult_t show_parts(struct run *run, const struct piece *piece, size_t stride)
{
    struct communicator *c = run->c;
    char *stage;
    flagcxResult_t result = step_acquire(c, run->signature, &stage);
    if (result != flagcxSuccess)
        return result;
    for (int rank = 0; rank < c->nranks; rank++) {
        if (rank == c->rank)
            continue;
        size_t from = (piece->start + (stride != 0 ? (size_t)rank * stride : part_start(piece, rank))) * run->size;
        size_t length = stride != 0 ? piece->length : part_length(piece, rank);
        memcpy(stage + place_in_stage(run, c->rank, rank, piece->part), run->send + from, length * run->size);
    }
    step_post(c, run->signature);
    return flagcxSuccess;
}

/* Waits for what all others show to this rank. */
static flagcxResult_t await_parts(struct run *run, const struct piece *piece, const char *own)
{
    flagcxResult_t result = await_inputs(run, own, 0);
    for (int rank = 0; result == flagcxSuccess && rank < run->c->nranks; rank++)
        if (rank != run->c->rank)
            run->inputs[rank] = (const char *)run->inputs[rank] + place_in_stage(run, rank, run->c->rank, piece->part);
    return result;
}

/* Reduces this rank's part of the piece and shows the result to all. */
static flagcxResult_t reduce_part(struct run *run, const struct piece *piece)
{
    struct communicator *c = run->c;
    size_t start = (piece->start + part_start(piece, c->rank)) * run->size;
    size_t length = part_length(piece, c->rank);
    char *stage;
    flagcxResult_t result = await_parts(run, piece, run->send + start);
    if (result != flagcxSuccess)
        return result;
    run->reduce(run->receive + start, run->inputs, c->nranks, length);
    step_finish(c);
    result = step_acquire(c, run->signature, &stage);
    if (result != flagcxSuccess)
        return result;
    memcpy(stage, run->receive + start, length * run->size);
    step_post(c, run->signature);
    return flagcxSuccess;
}

static flagcxResult_t take_results(struct run *run, const struct piece *piece)
{
    struct communicator *c = run->c;
    for (int rank = 0; rank < c->nranks; rank++) {
        const char *stage;
        if (rank == c->rank)
            continue;
        flagcxResult_t result = step_await(c, rank, run->signature, &stage);
        if (result != flagcxSuccess)
            return result;
        memcpy(run->receive + (piece->start + part_start(piece, rank)) * run->size, stage,
               part_length(piece, rank) * run->size);
    }
    step_finish(c);
    return flagcxSuccess;
}

/* Each rank reduces its part of a piece, then all take each other's results. */
static flagcxResult_t all_reduce(struct run *run)
{
    if (run->count * run->size <= ONE_EXCHANGE_BYTES)
        return all_reduce_at_once(run);
    size_t largest = largest_part(run);
    flagcxResult_t result = flagcxSuccess;
    for (size_t start = 0; start < run->count && result == flagcxSuccess;) {
        struct piece piece = cut(run, start, largest);
        result = show_parts(run, &piece, 0);
        if (result == flagcxSuccess)
            result = reduce_part(run, &piece);
        if (result == flagcxSuccess)
            result = take_results(run, &piece);
        start += piece.length;
    }
    return result;
}

static flagcxResult_t reduce_scatter(struct run *run)
{
    struct communicator *c = run->c;
    size_t largest = largest_part(run);
    for (size_t start = 0; start < run->count; start += largest) {
        size_t length = smaller(run->count - start, largest);
        struct piece piece = {.start = start, .length = length, .part = length};
        const char *own = run->send + ((size_t)c->rank * run->count + start) * run->size;
        flagcxResult_t result = show_parts(run, &piece, run->count);
        if (result == flagcxSuccess)
            result = await_parts(run, &piece, own);
        if (result != flagcxSuccess)
            return result;
        run->reduce(run->receive + start * run->size, run->inputs, c->nranks, length);
        step_finish(c);
    }
    return flagcxSuccess;
}

/* Fills this rank's stage with a piece of its send buffer. */
static flagcxResult_t show(struct run *run, size_t offset, size_t bytes)
{
    char *stage;
    flagcxResult_t result = step_acquire(run->c, run->signature, &stage);
    if (result != flagcxSuccess)
        return result;
    if (bytes > 0)
        memcpy(stage, run->send + offset, bytes);
    step_post(run->c, run->signature);
    return flagcxSuccess;
}

/* Says what this rank is in, where it has nothing to show. */
static flagcxResult_t take_part(struct run *run) { return show(run, 0, 0); }

/* The end of a piece that this rank did not need all others for; after the last one all must agree. */
static flagcxResult_t end_piece(struct run *run, bool is_last)
{
    flagcxResult_t result = is_last ? await_inputs(run, NULL, 0) : flagcxSuccess;
    if (result == flagcxSuccess)
        step_finish(run->c);
    return result;
}

static flagcxResult_t reduce_piece(struct run *run, size_t start, size_t length)
{
    struct communicator *c = run->c;
    if (c->rank != run->root)
        return show(run, start * run->size, length * run->size);
    flagcxResult_t result = take_part(run);
    if (result == flagcxSuccess)
        result = await_inputs(run, run->send + start * run->size, 0);
    if (result == flagcxSuccess)
        run->reduce(run->receive + start * run->size, run->inputs, c->nranks, length);
    return result;
}

static flagcxResult_t reduce(struct run *run)
{
    size_t largest = STAGE_BYTES / run->size;
    for (size_t start = 0; start < run->count; start += largest) {
        size_t length = smaller(run->count - start, largest);
        flagcxResult_t result = reduce_piece(run, start, length);
        if (result == flagcxSuccess)
            result = end_piece(run, start + length == run->count);
        if (result != flagcxSuccess)
            return result;
    }
    return flagcxSuccess;
}

static flagcxResult_t take(struct run *run, int rank, char *to, size_t bytes)
{
    const char *stage;
    flagcxResult_t result = step_await(run->c, rank, run->signature, &stage);
    if (result == flagcxSuccess)
        memcpy(to, stage, bytes);
    return result;
}

static flagcxResult_t broadcast_piece(struct run *run, size_t start, size_t length)
{
    if (run->c->rank == run->root)
        return show(run, start, length);
    flagcxResult_t result = take_part(run);
    return result == flagcxSuccess ? take(run, run->root, run->receive + start, length) : result;
}

static flagcxResult_t broadcast(struct run *run)
{
    size_t bytes = run->count * run->size;
    for (size_t start = 0; start < bytes; start += STAGE_BYTES) {
        size_t length = smaller(bytes - start, STAGE_BYTES);
        flagcxResult_t result = broadcast_piece(run, start, length);
        if (result == flagcxSuccess)
            result = end_piece(run, start + length == bytes);
        if (result != flagcxSuccess)
            return result;
    }
    if (run->c->rank == run->root)
        copy(run->receive, run->send, bytes);
    return flagcxSuccess;
}

static flagcxResult_t all_gather(struct run *run)
{
    struct communicator *c = run->c;
    size_t bytes = run->count * run->size;
    for (size_t start = 0; start < bytes; start += STAGE_BYTES) {
        size_t length = smaller(bytes - start, STAGE_BYTES);
        flagcxResult_t result = show(run, start, length);
        if (result != flagcxSuccess)
            return result;
        copy(run->receive + (size_t)c->rank * bytes + start, run->send + start, length);
        for (int rank = 0; rank < c->nranks && result == flagcxSuccess; rank++)
            if (rank != c->rank)
                result = take(run, rank, run->receive + (size_t)rank * bytes + start, length);
        if (result != flagcxSuccess)
            return result;
        step_finish(c);
    }
    return flagcxSuccess;
}

/* Of one rank, every reduction is its input, and every other collective a copy. */
static flagcxResult_t run_alone(struct run *run)
{
    if (run->receive != NULL)
        copy(run->receive, run->send, run->count * run->size);
    return flagcxSuccess;
}

flagcxResult_t run_collective(struct communicator *c, const struct operation *operation)
{
    static flagcxResult_t (*const algorithms[NUMBER_OF_CALLS])(struct run *) = {
        [CALL_flagcxBarrier] = barrier,
        [CALL_flagcxReduce] = reduce,
        [CALL_flagcxBroadcast] = broadcast,
        [CALL_flagcxAllReduce] = all_reduce,
        [CALL_flagcxReduceScatter] = reduce_scatter,
        [CALL_flagcxAllGather] = all_gather,
    };
    struct run run;
    run.c = c;
    run.send = operation->send;
    run.receive = operation->receive;
    run.count = operation->count + (size_t)PLANTED_SHIFT(c->rank);
    run.size = element_bytes(operation->datatype);
    run.root = operation->root;
    if (c->nranks == 1)
        return run_alone(&run);
    c->first_step = c->step;
    run.signature = signature_of(operation);
    run.reduce = reduction_for(operation->datatype, operation->op);
    return algorithms[operation->call](&run);
}
