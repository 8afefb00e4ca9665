/* A communicator: what a rank knows of itself and of the others. */
#ifndef HOSTCX_COMMUNICATOR_H
#define HOSTCX_COMMUNICATOR_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "errors.h"
#include "flagcx_api.h"
#include "identity.h"
#include "segment.h"

struct communicator;

/* What flagcxComm_t points to. It outlives the communicator, so that a handle used after destroy or
 * abort is an error and not a crash; it is small and is kept until the process ends. */
struct flagcxComm {
    /* Held for the length of a call: the calls of several threads take turns. */
    pthread_mutex_t call_lock;
    /* Held for moments, while `live` must not go away. */
    pthread_mutex_t state_lock;
    struct communicator *live;
    pthread_mutex_t message_lock;
    _Atomic int ended;
    _Atomic int aborting;
    /* A flagcxResult_t; stays once it is not flagcxSuccess. */
    _Atomic int async_error;
    int rank;
    int nranks;
    unsigned generation;
    char message[MESSAGE_BYTES];
    struct flagcxComm *next;
};

/* How far this rank has seen another come: what the other writes is compared with it. */
struct peer {
    struct watch watch;
    bool same_process;
    uint64_t posted;
    uint64_t finished;
    uint64_t ring_sent;
    uint64_t ring_sent_taken;
    uint64_t ring_received;
    uint64_t ring_received_written;
};

struct communicator {
    struct flagcxComm *handle;
    struct segment *segment;
    int rank;
    int nranks;
    /* The next step of a collective; the same on all ranks. */
    uint64_t step;
    /* The first step of the collective in progress. */
    uint64_t first_step;
    /* Calls of gather, scatter and all-to-all so far: the same on all ranks. */
    uint64_t exchanges;
    /* Nanoseconds that a wait spins before it sleeps, now and at most. */
    int64_t spin;
    int64_t longest_spin;
    uint64_t waits;
    struct peer peers[];
};

/* Meets the other ranks; blocks until all have come or one that came is gone. */
flagcxResult_t communicator_join(const flagcxUniqueId *id, int nranks, int rank, struct flagcxComm **comm);

/* Begins a call: takes the call lock, or says why the communicator cannot be used. */
flagcxResult_t communicator_enter(struct flagcxComm *comm, struct communicator **live);

void communicator_leave(struct flagcxComm *comm);

/* Whether the handle is that of a communicator of this process which has not been ended. */
flagcxResult_t communicator_check_handle(struct flagcxComm *comm);

/* The same, and whether the communicator has no error. Neither waits for calls in flight. */
flagcxResult_t communicator_check(struct flagcxComm *comm);

/* Destroys (RANK_LEFT) or aborts (RANK_ABORTED): calls in flight end first. */
flagcxResult_t communicator_end(struct flagcxComm *comm, enum rank_state state);

/* Looks for dead and failed ranks, without waiting for calls in flight. */
flagcxResult_t communicator_async_error(struct flagcxComm *comm);

/* An error of one call: words for this thread and this communicator. */
flagcxResult_t fail_call(struct flagcxComm *comm, flagcxResult_t code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* An error after which the communicator is of no use: kept, printed, and told to the other ranks. */
flagcxResult_t fail_communicator(struct communicator *c, flagcxResult_t code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Words of the last error of this communicator, in memory of the calling thread. */
const char *communicator_last_error(struct flagcxComm *comm);

static inline struct rank_slot *slot_of(const struct communicator *c, int rank) { return &c->segment->slots[rank]; }

#endif
