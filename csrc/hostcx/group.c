/* Groups: a list per thread; at the end one communicator after the other in this thread if there is one,
 * a thread for each if there are several, because ranks may name their communicators in any order. */
#include "group.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct item {
    struct flagcxComm *comm;
    enum { COLLECTIVE, TRANSFER, EXCHANGE } kind;
    union {
        struct operation operation;
        struct transfer transfer;
    };
};

struct group {
    int depth;
    flagcxResult_t error;
    struct item *items;
    size_t count;
    size_t room;
};

/* What one communicator has to do, in a thread of its own or in the caller's. */
struct share {
    const struct group *group;
    struct flagcxComm *comm;
    flagcxResult_t result;
    char message[MESSAGE_BYTES];
    pthread_t thread;
    bool has_thread;
};

static _Thread_local struct group group;
static pthread_key_t cleanup_key;

static void make_key(void) { pthread_key_create(&cleanup_key, free); }

/* The list stays for the thread's next group and goes with the thread. */
static flagcxResult_t make_room(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (group.count < group.room)
        return flagcxSuccess;
    size_t room = group.room == 0 ? 64 : group.room * 2;
    struct item *items = realloc(group.items, room * sizeof *items);
    if (items == NULL)
        return fail(flagcxSystemError, "out of memory for a group of %zu calls", group.count + 1);
    group.items = items;
    group.room = room;
    pthread_once(&once, make_key);
    pthread_setspecific(cleanup_key, items);
    return flagcxSuccess;
}

flagcxResult_t poison_group(flagcxResult_t code)
{
    if (group.depth > 0 && code != flagcxSuccess)
        group.error = code;
    return code;
}

static flagcxResult_t run_now(struct flagcxComm *comm, const struct operation *operation)
{
    struct communicator *c;
    flagcxResult_t result = communicator_enter(comm, &c);
    if (result != flagcxSuccess)
        return result;
    result = run_collective(c, operation);
    communicator_leave(comm);
    return result;
}

flagcxResult_t submit_collective(struct flagcxComm *comm, const struct operation *operation)
{
    if (group.depth == 0)
        return run_now(comm, operation);
    flagcxResult_t result = make_room();
    if (result != flagcxSuccess)
        return poison_group(result);
    group.items[group.count++] = (struct item){.comm = comm, .operation = *operation};
    return flagcxSuccess;
}

flagcxResult_t add_transfer(struct flagcxComm *comm, const struct transfer *transfer)
{
    flagcxResult_t result = make_room();
    if (result != flagcxSuccess)
        return poison_group(result);
    group.items[group.count++] = (struct item){.comm = comm, .kind = TRANSFER, .transfer = *transfer};
    return flagcxSuccess;
}

flagcxResult_t add_exchange(struct flagcxComm *comm)
{
    flagcxResult_t result = make_room();
    if (result != flagcxSuccess)
        return poison_group(result);
    group.items[group.count++] = (struct item){.comm = comm, .kind = EXCHANGE};
    return flagcxSuccess;
}

ptrdiff_t next_transfer_index(const struct flagcxComm *comm)
{
    ptrdiff_t index = 0;
    for (size_t i = 0; i < group.count; i++)
        index += group.items[i].kind == TRANSFER && group.items[i].comm == comm;
    return index;
}

/* Collectives first, in order, then all transfers at once: so does NCCL with a group. */
static flagcxResult_t run_share_on(struct communicator *c, const struct share *share, struct transfer *transfers)
{
    const struct group *all = share->group;
    size_t count = 0, exchanges = 0;
    for (size_t i = 0; i < all->count; i++) {
        const struct item *item = &all->items[i];
        if (item->comm != share->comm)
            continue;
        flagcxResult_t result = flagcxSuccess;
        switch (item->kind) {
        case TRANSFER:
            transfers[count] = item->transfer;
            if (item->transfer.exchange != 0)
                transfers[count].exchange = c->exchanges;
            count++;
            break;
        case EXCHANGE:
            result = exchanges++ == 0 ? check_left_over(c) : flagcxSuccess;
            c->exchanges++;
            break;
        case COLLECTIVE: result = run_collective(c, &item->operation); break;
        }
        if (result != flagcxSuccess)
            return result;
    }
    return count > 0 ? run_transfers(c, transfers, count) : flagcxSuccess;
}

static flagcxResult_t run_share(struct share *share)
{
    struct communicator *c;
    struct transfer few[8];
    struct transfer *transfers = share->group->count <= 8 ? few : malloc(share->group->count * sizeof *transfers);
    if (transfers == NULL)
        return fail(flagcxSystemError, "out of memory for a group of %zu calls", share->group->count);
    flagcxResult_t result = communicator_enter(share->comm, &c);
    if (result == flagcxSuccess) {
        result = run_share_on(c, share, transfers);
        communicator_leave(share->comm);
    }
    if (transfers != few)
        free(transfers);
    return result;
}

static void *run_share_in_thread(void *argument)
{
    struct share *share = argument;
    share->result = run_share(share);
    memcpy(share->message, last_error_of_thread(), sizeof share->message);
    return NULL;
}

static size_t list_shares(const struct group *all, struct share *shares)
{
    size_t count = 0;
    for (size_t i = 0; i < all->count; i++) {
        size_t k = 0;
        while (k < count && shares[k].comm != all->items[i].comm)
            k++;
        if (k == count)
            shares[count++] = (struct share){.group = all, .comm = all->items[i].comm};
    }
    return count;
}

static flagcxResult_t run_several(struct share *shares, size_t count)
{
    for (size_t i = 1; i < count; i++) {
        shares[i].has_thread = pthread_create(&shares[i].thread, NULL, run_share_in_thread, &shares[i]) == 0;
        if (!shares[i].has_thread)
            shares[i].result = fail(flagcxSystemError, "no thread for communicator %zu of a group", i);
    }
    shares[0].result = run_share(&shares[0]);
    flagcxResult_t result = shares[0].result;
    for (size_t i = 1; i < count; i++) {
        if (shares[i].has_thread)
            pthread_join(shares[i].thread, NULL);
        if (result == flagcxSuccess && shares[i].result != flagcxSuccess)
            result = fail(shares[i].result, "%s", shares[i].message);
    }
    return result;
}

static flagcxResult_t run_all(const struct group *all)
{
    bool one = true;
    for (size_t i = 1; i < all->count && one; i++)
        one = all->items[i].comm == all->items[0].comm;
    if (one) {
        struct share share;
        share.group = all;
        share.comm = all->items[0].comm;
        return run_share(&share);
    }
    struct share *shares = malloc(all->count * sizeof *shares);
    if (shares == NULL)
        return fail(flagcxSystemError, "out of memory for a group of %zu calls", all->count);
    flagcxResult_t result = run_several(shares, list_shares(all, shares));
    free(shares);
    return result;
}

void group_begin(void) { group.depth++; }

flagcxResult_t group_end(void)
{
    if (group.depth == 0)
        return fail(flagcxInvalidUsage, "flagcxGroupEnd without flagcxGroupStart in this thread");
    if (--group.depth > 0)
        return flagcxSuccess;
    flagcxResult_t result = group.error;
    if (result == flagcxSuccess && group.count > 0)
        result = run_all(&group);
    group.error = flagcxSuccess;
    group.count = 0;
    return result;
}
