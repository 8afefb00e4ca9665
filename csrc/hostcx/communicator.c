/* A communicator's life: calls that begin and end, errors that stay, destroy and abort. */
#include "communicator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wait.h"

static void keep_message(struct flagcxComm *comm, const char *message)
{
    pthread_mutex_lock(&comm->message_lock);
    snprintf(comm->message, sizeof comm->message, "%s", message);
    pthread_mutex_unlock(&comm->message_lock);
}

flagcxResult_t fail_call(struct flagcxComm *comm, flagcxResult_t code, const char *format, ...)
{
    char message[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    if (comm != NULL)
        keep_message(comm, message);
    return fail(code, "%s", message);
}

flagcxResult_t fail_communicator(struct communicator *c, flagcxResult_t code, const char *format, ...)
{
    char reason[MESSAGE_BYTES], message[MESSAGE_BYTES];
    int none = flagcxSuccess;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    if (!atomic_compare_exchange_strong(&c->handle->async_error, &none, (int)code))
        return communicator_check(c->handle);
    snprintf(message, sizeof message, "rank %d of %d: %.*s; this communicator cannot be used any more", c->rank,
             c->nranks, MESSAGE_BYTES - 96, reason);
    fail_call(c->handle, code, "%s", message);
    tell("%s", message);
    atomic_store(&slot_of(c, c->rank)->state, RANK_FAILED);
    for (int rank = 0; rank < c->nranks; rank++)
        if (rank != c->rank)
            ring(c, rank);
    return code;
}

const char *communicator_last_error(struct flagcxComm *comm)
{
    static _Thread_local char message[MESSAGE_BYTES];
    pthread_mutex_lock(&comm->message_lock);
    memcpy(message, comm->message, sizeof message);
    pthread_mutex_unlock(&comm->message_lock);
    return message;
}

flagcxResult_t communicator_check_handle(struct flagcxComm *comm)
{
    if (comm == NULL)
        return fail(flagcxInternalError, "the communicator is NULL: flagcxCommInitRank has not made it");
    if (comm->generation != fork_generation())
        return fail(flagcxInvalidUsage, "this process is a fork of the one that made the communicator; a fork must "
                                        "make its own");
    if (atomic_load(&comm->ended))
        return fail(flagcxInvalidArgument, "the communicator has been destroyed or aborted");
    return flagcxSuccess;
}

flagcxResult_t communicator_check(struct flagcxComm *comm)
{
    flagcxResult_t result = communicator_check_handle(comm);
    if (result != flagcxSuccess)
        return result;
    int error = atomic_load(&comm->async_error);
    if (error == flagcxSuccess)
        return flagcxSuccess;
    return fail((flagcxResult_t)error, "%s", communicator_last_error(comm));
}

flagcxResult_t communicator_enter(struct flagcxComm *comm, struct communicator **live)
{
    pthread_mutex_lock(&comm->call_lock);
    flagcxResult_t result = communicator_check(comm);
    if (result == flagcxSuccess && atomic_load(&comm->aborting))
        result = fail_call(comm, flagcxInternalError, "the communicator is being aborted");
    if (result != flagcxSuccess) {
        pthread_mutex_unlock(&comm->call_lock);
        return result;
    }
    *live = comm->live;
    return flagcxSuccess;
}

void communicator_leave(struct flagcxComm *comm) { pthread_mutex_unlock(&comm->call_lock); }

static void interrupt_call(struct flagcxComm *comm)
{
    atomic_store(&comm->aborting, 1);
    pthread_mutex_lock(&comm->state_lock);
    if (comm->live != NULL)
        ring_self(comm->live);
    pthread_mutex_unlock(&comm->state_lock);
}

static void release(struct communicator *c, enum rank_state state)
{
    uint32_t joined = RANK_JOINED;
    atomic_compare_exchange_strong(&slot_of(c, c->rank)->state, &joined, (uint32_t)state);
    ring_all(c);
    for (int rank = 0; rank < c->nranks; rank++)
        watch_close(&c->peers[rank].watch);
    segment_release(c->segment);
    free(c);
}

flagcxResult_t communicator_end(struct flagcxComm *comm, enum rank_state state)
{
    flagcxResult_t result = communicator_check_handle(comm);
    if (result != flagcxSuccess)
        return result;
    if (state == RANK_ABORTED)
        interrupt_call(comm);
    pthread_mutex_lock(&comm->call_lock);
    pthread_mutex_lock(&comm->state_lock);
    struct communicator *c = comm->live;
    comm->live = NULL;
    atomic_store(&comm->ended, 1);
    pthread_mutex_unlock(&comm->state_lock);
    pthread_mutex_unlock(&comm->call_lock);
    if (c == NULL)
        return communicator_check_handle(comm);
    release(c, state);
    return flagcxSuccess;
}

flagcxResult_t communicator_async_error(struct flagcxComm *comm)
{
    pthread_mutex_lock(&comm->state_lock);
    if (comm->live != NULL && atomic_load(&comm->async_error) == flagcxSuccess)
        check_ranks(comm->live, NULL, true);
    pthread_mutex_unlock(&comm->state_lock);
    return (flagcxResult_t)atomic_load(&comm->async_error);
}
