/* Point to point: a ring of bytes per ordered pair of ranks, and all transfers of a group at once.
 *
 * A message is a head of one cache line (its length and what it is part of) and the data, padded to whole lines. Each side
 * keeps its own position to itself and checks the other's against it before it moves a byte.
 */
#include <string.h>

#include "operation.h"
#include "wait.h"

/* Published at once, so that sender and receiver work at the same time. */
enum { PORTION_BYTES = 64 * 1024 };

/* The transfers of one call, in order per direction and peer. */
struct batch {
    struct communicator *c;
    struct transfer *transfers;
    size_t remaining;
    ptrdiff_t send_head[MAXIMUM_RANKS];
    ptrdiff_t receive_head[MAXIMUM_RANKS];
};

static uint64_t padded(uint64_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static void copy_into_ring(char *ring_start, size_t ring_size, uint64_t position, const void *data, size_t bytes)
{
    size_t offset = (size_t)(position % ring_size);
    size_t until_end = smaller(bytes, ring_size - offset);
    memcpy(ring_start + offset, data, until_end);
    if (bytes > until_end)
        memcpy(ring_start, (const char *)data + until_end, bytes - until_end);
}

static void copy_out_of_ring(const char *ring_start, size_t ring_size, uint64_t position, void *data, size_t bytes)
{
    size_t offset = (size_t)(position % ring_size);
    size_t until_end = smaller(bytes, ring_size - offset);
    memcpy(data, ring_start + offset, until_end);
    if (bytes > until_end)
        memcpy((char *)data + until_end, ring_start, bytes - until_end);
}

static flagcxResult_t damaged(struct communicator *c, int peer, const char *what, uint64_t value)
{
    return fail_communicator(c, flagcxInternalError, "the shared memory is damaged: the ring with rank %d says %s=%llu",
                             peer, what, (unsigned long long)value);
}

/* Bytes that this rank may put into the ring to the peer. */
static flagcxResult_t room_to(struct communicator *c, int peer, size_t *room)
{
    struct peer *p = &c->peers[peer];
    uint64_t taken = atomic_load(&ring_control(c->segment, c->rank, peer)->taken);
    if (taken < p->ring_sent_taken || taken > p->ring_sent || taken % CACHE_LINE != 0)
        return damaged(c, peer, "taken", taken);
    p->ring_sent_taken = taken;
    *room = c->segment->ring_bytes - (size_t)(p->ring_sent - taken);
    return flagcxSuccess;
}

/* Bytes that the peer has put into the ring to this rank. */
static flagcxResult_t waiting_from(struct communicator *c, int peer, size_t *waiting)
{
    struct peer *p = &c->peers[peer];
    uint64_t written = atomic_load(&ring_control(c->segment, peer, c->rank)->written);
    if (written < p->ring_received_written || written > p->ring_received + c->segment->ring_bytes ||
        written % CACHE_LINE != 0)
        return damaged(c, peer, "written", written);
    p->ring_received_written = written;
    *waiting = (size_t)(written - p->ring_received);
    return flagcxSuccess;
}

static flagcxResult_t push(struct communicator *c, struct transfer *t, bool *moved)
{
    struct peer *p = &c->peers[t->peer];
    char *ring_start = ring_bytes(c->segment, c->rank, t->peer);
    size_t ring_size = c->segment->ring_bytes;
    size_t room = 0;
    flagcxResult_t result = room_to(c, t->peer, &room);
    if (result != flagcxSuccess || room == 0)
        return result;
    if (!t->begun) {
        struct message_head head = {
            .magic = message_magic, .bytes = t->bytes, .signature = t->signature, .exchange = t->exchange};
        copy_into_ring(ring_start, ring_size, p->ring_sent, &head, sizeof head);
        p->ring_sent += sizeof head;
        room -= sizeof head;
        t->begun = true;
    }
    size_t portion = smaller(smaller(t->bytes - t->moved, room), PORTION_BYTES);
    if (portion > 0)
        copy_into_ring(ring_start, ring_size, p->ring_sent, t->buffer + t->moved, portion);
    t->moved += portion;
    p->ring_sent += padded(portion);
    atomic_store(&ring_control(c->segment, c->rank, t->peer)->written, p->ring_sent);
    ring(c, t->peer);
    *moved = true;
    return flagcxSuccess;
}

static flagcxResult_t check_head(struct communicator *c, const struct transfer *t, const struct message_head *head)
{
    char here[128], there[128];
    if (head->magic != message_magic)
        return damaged(c, t->peer, "message head", head->magic);
    if (head->bytes == t->bytes && head->signature == t->signature && head->exchange == t->exchange)
        return flagcxSuccess;
    if (head->signature == t->signature && head->exchange != t->exchange)
        return fail_communicator(c, flagcxInvalidUsage,
                                 "the ranks do not make the same calls: in the ring lies what rank %d sent in exchange "
                                 "%llu, this rank is in exchange %llu (gathers, scatters and all-to-alls, counted from 1)",
                                 t->peer, (unsigned long long)head->exchange, (unsigned long long)t->exchange);
    describe_signature(t->signature, here, sizeof here);
    describe_signature(head->signature, there, sizeof there);
    return fail_communicator(c, flagcxInvalidUsage, "rank %d sends %llu bytes in %s where this rank receives %zu in %s",
                             t->peer, (unsigned long long)head->bytes, there, t->bytes, here);
}

flagcxResult_t check_left_over(struct communicator *c)
{
    for (int peer = 0; peer < c->nranks; peer++) {
        struct message_head head;
        char there[128];
        size_t waiting = 0;
        flagcxResult_t result = peer == c->rank ? flagcxSuccess : waiting_from(c, peer, &waiting);
        if (result != flagcxSuccess)
            return result;
        if (waiting < sizeof head)
            continue;
        copy_out_of_ring(ring_bytes(c->segment, peer, c->rank), c->segment->ring_bytes, c->peers[peer].ring_received,
                         &head, sizeof head);
        if (head.exchange == 0 || head.exchange > c->exchanges)
            continue;
        describe_signature(head.signature, there, sizeof there);
        return fail_communicator(c, flagcxInvalidUsage, "the ranks did not make the same call: what rank %d sent in %s "
                                                        "was not received",
                                 peer, there);
    }
    return flagcxSuccess;
}

static size_t may_overwrite(const struct batch *batch, const struct transfer *t)
{
    return t->behind < 0 ? t->bytes : batch->transfers[t->behind].moved;
}

static flagcxResult_t pull(struct batch *batch, struct transfer *t, bool *moved)
{
    struct communicator *c = batch->c;
    struct peer *p = &c->peers[t->peer];
    const char *ring_start = ring_bytes(c->segment, t->peer, c->rank);
    size_t ring_size = c->segment->ring_bytes;
    uint64_t before = p->ring_received;
    size_t waiting = 0;
    flagcxResult_t result = waiting_from(c, t->peer, &waiting);
    if (result != flagcxSuccess || waiting == 0)
        return result;
    if (!t->begun) {
        struct message_head head;
        copy_out_of_ring(ring_start, ring_size, p->ring_received, &head, sizeof head);
        result = check_head(c, t, &head);
        if (result != flagcxSuccess)
            return result;
        p->ring_received += sizeof head;
        waiting -= sizeof head;
        t->begun = true;
    }
    size_t portion = smaller(smaller(may_overwrite(batch, t) - t->moved, waiting), PORTION_BYTES);
    /* Only the end of a message may lie in a part of a line. */
    if (portion < t->bytes - t->moved)
        portion = portion / CACHE_LINE * CACHE_LINE;
    if (portion > 0)
        copy_out_of_ring(ring_start, ring_size, p->ring_received, t->buffer + t->moved, portion);
    t->moved += portion;
    p->ring_received += padded(portion);
    if (p->ring_received == before)
        return flagcxSuccess;
    atomic_store(&ring_control(c->segment, t->peer, c->rank)->taken, p->ring_received);
    ring(c, t->peer);
    *moved = true;
    return flagcxSuccess;
}

static bool done(const struct transfer *t) { return t->begun && t->moved == t->bytes; }

static flagcxResult_t advance(struct batch *batch, ptrdiff_t *head, bool *moved)
{
    while (*head >= 0) {
        struct transfer *t = &batch->transfers[*head];
        flagcxResult_t result = t->is_send ? push(batch->c, t, moved) : pull(batch, t, moved);
        if (result != flagcxSuccess)
            return result;
        if (!done(t))
            return flagcxSuccess;
        *head = t->next;
        batch->remaining--;
    }
    return flagcxSuccess;
}

static bool can_push(const struct batch *batch, int peer)
{
    const struct communicator *c = batch->c;
    return atomic_load(&ring_control(c->segment, c->rank, peer)->taken) != c->peers[peer].ring_sent_taken;
}

static bool can_pull(const struct batch *batch, int peer)
{
    const struct communicator *c = batch->c;
    return atomic_load(&ring_control(c->segment, peer, c->rank)->written) != c->peers[peer].ring_received_written;
}

/* Whether anything has changed since the last round, in which nothing could move. */
static bool any_can_move(const void *context)
{
    const struct batch *batch = context;
    for (int peer = 0; peer < batch->c->nranks; peer++) {
        if (batch->send_head[peer] >= 0 && can_push(batch, peer))
            return true;
        if (batch->receive_head[peer] >= 0 && can_pull(batch, peer))
            return true;
    }
    return false;
}

static bool has_transfers_with(const void *context, int rank)
{
    const struct batch *batch = context;
    return batch->send_head[rank] >= 0 || batch->receive_head[rank] >= 0;
}

static flagcxResult_t move_all(struct batch *batch)
{
    struct condition condition = {.ready = any_can_move, .needs = has_transfers_with, .context = batch};
    while (batch->remaining > 0) {
        bool moved = false;
        for (int peer = 0; peer < batch->c->nranks; peer++) {
            flagcxResult_t result = advance(batch, &batch->send_head[peer], &moved);
            if (result == flagcxSuccess)
                result = advance(batch, &batch->receive_head[peer], &moved);
            if (result != flagcxSuccess)
                return result;
        }
        if (moved)
            continue;
        flagcxResult_t result = wait_for(batch->c, &condition);
        if (result != flagcxSuccess)
            return result;
    }
    return flagcxSuccess;
}

/* What a rank sends to itself is a copy; each send must have its receive in the same group. */
static flagcxResult_t copy_to_self(struct batch *batch)
{
    struct communicator *c = batch->c;
    ptrdiff_t *send = &batch->send_head[c->rank];
    ptrdiff_t *receive = &batch->receive_head[c->rank];
    while (*send >= 0 && *receive >= 0) {
        const struct transfer *from = &batch->transfers[*send];
        const struct transfer *to = &batch->transfers[*receive];
        if (from->bytes != to->bytes || from->signature != to->signature || from->exchange != to->exchange)
            return fail_call(c->handle, flagcxInvalidUsage, "rank %d sends %zu bytes to itself where it receives %zu, "
                                                              "or in another call or datatype",
                             c->rank, from->bytes, to->bytes);
        if (from->bytes > 0)
            memmove(to->buffer, from->buffer, from->bytes);
        *send = from->next;
        *receive = to->next;
        batch->remaining -= 2;
    }
    if (*send < 0 && *receive < 0)
        return flagcxSuccess;
    return fail_call(c->handle, flagcxInvalidUsage, "rank %d %s itself without the other half in the same group",
                     c->rank, *send >= 0 ? "sends to" : "receives from");
}

/* Puts the transfer at the end of its queue; tails are only needed while the queues are made. */
static void enqueue(struct batch *batch, size_t index, ptrdiff_t *tails)
{
    struct transfer *t = &batch->transfers[index];
    ptrdiff_t *heads = t->is_send ? batch->send_head : batch->receive_head;
    if (heads[t->peer] < 0)
        heads[t->peer] = (ptrdiff_t)index;
    else
        batch->transfers[tails[t->peer]].next = (ptrdiff_t)index;
    tails[t->peer] = (ptrdiff_t)index;
}

flagcxResult_t run_transfers(struct communicator *c, struct transfer *transfers, size_t count)
{
    struct batch batch;
    ptrdiff_t send_tail[MAXIMUM_RANKS], receive_tail[MAXIMUM_RANKS];
    batch.c = c;
    batch.transfers = transfers;
    batch.remaining = count;
    for (int rank = 0; rank < c->nranks; rank++)
        batch.send_head[rank] = batch.receive_head[rank] = -1;
    for (size_t i = 0; i < count; i++)
        enqueue(&batch, i, transfers[i].is_send ? send_tail : receive_tail);
    flagcxResult_t result = copy_to_self(&batch);
    return result == flagcxSuccess ? move_all(&batch) : result;
}
