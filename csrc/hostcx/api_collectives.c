/* FlagCX's collectives and point to point: arguments are checked here, before anything starts.
 *
 * Streams: every call has done its work when it returns (flagcxGroupEnd for grouped calls); the stream
 * argument orders nothing. It must not be NULL all the same, because FlagCX crashes on that.
 *
 * Where FlagCX over NCCL differs from call to call, hostcx follows it: a collective of no elements does
 * nothing and waits for nobody, gather, scatter and all-to-all are groups of sends and receives, an
 * invalid argument makes the open group fail, a NULL communicator does not.
 * Where it answers badly, hostcx is strict: an invalid datatype of gather, scatter or all-to-all is an
 * error (FlagCX succeeds and moves nothing), a NULL buffer is an error (FlagCX faults), and a barrier
 * reports its errors (FlagCX returns success).
 */
#include <stdint.h>

#include "group.h"
#include "reduce.h"

static flagcxResult_t invalid(const struct operation *operation, struct flagcxComm *comm, const char *what,
                              long long found, long long limit)
{
    return fail_call(comm, flagcxInvalidArgument, "%s: %s is %lld; allowed are 0 to %lld", call_name(operation->call),
                     what, found, limit - 1);
}

static flagcxResult_t check_numbers(const struct operation *o, struct flagcxComm *comm)
{
    if ((int)o->datatype < 0 || (int)o->datatype >= flagcxNumTypes)
        return invalid(o, comm, "datatype", (int)o->datatype, flagcxNumTypes);
    if ((int)o->op < 0 || (int)o->op >= flagcxNumRedOps)
        return invalid(o, comm, "op", (int)o->op, flagcxNumRedOps);
    if (o->root < 0 || o->root >= comm->nranks)
        return invalid(o, comm, o->call == CALL_flagcxSend || o->call == CALL_flagcxRecv ? "peer" : "root", o->root,
                       comm->nranks);
    if (o->count > SIZE_MAX / 8 / (size_t)comm->nranks)
        return fail_call(comm, flagcxInvalidArgument, "%s: count is %zu elements, more than memory has addresses",
                         call_name(o->call), o->count);
    return flagcxSuccess;
}

/* Which buffers a rank must give, other than all. */
static bool needs_send(const struct operation *o, int rank)
{
    if (o->call == CALL_flagcxBroadcast || o->call == CALL_flagcxScatter)
        return rank == o->root;
    return o->call != CALL_flagcxRecv && o->call != CALL_flagcxBarrier;
}

static bool needs_receive(const struct operation *o, int rank)
{
    if (o->call == CALL_flagcxReduce || o->call == CALL_flagcxGather)
        return rank == o->root;
    return o->call != CALL_flagcxSend && o->call != CALL_flagcxBarrier;
}

static flagcxResult_t check_pointers(const struct operation *o, struct flagcxComm *comm, flagcxStream_t stream)
{
    if (stream == NULL)
        return fail_call(comm, flagcxInvalidArgument, "%s: the stream is NULL: box the raw stream, raw 0 too, with the "
                                                      "device handle's streamCopy",
                         call_name(o->call));
    if (o->count == 0)
        return flagcxSuccess;
    if (o->send == NULL && needs_send(o, comm->rank))
        return fail_call(comm, flagcxInvalidArgument, "%s: sendbuff is NULL", call_name(o->call));
    if (o->receive == NULL && needs_receive(o, comm->rank))
        return fail_call(comm, flagcxInvalidArgument, "%s: recvbuff is NULL", call_name(o->call));
    return flagcxSuccess;
}

/* All checks of a call; an error other than of a NULL communicator makes the open group fail. */
static flagcxResult_t check(const struct operation *o, struct flagcxComm *comm, flagcxStream_t stream)
{
    flagcxResult_t result = communicator_check(comm);
    if (comm == NULL)
        return result;
    if (result == flagcxSuccess)
        result = check_numbers(o, comm);
    if (result == flagcxSuccess)
        result = check_pointers(o, comm, stream);
    return poison_group(result);
}

static flagcxResult_t collective(const struct operation *operation, struct flagcxComm *comm, flagcxStream_t stream)
{
    count_call(operation->call);
    flagcxResult_t result = check(operation, comm, stream);
    bool empty = operation->count == 0 && operation->call != CALL_flagcxBarrier;
    if (result != flagcxSuccess || empty)
        return result;
    return submit_collective(comm, operation);
}

flagcxResult_t flagcxBarrier(flagcxComm_t comm, flagcxStream_t stream)
{
    struct operation operation = {.call = CALL_flagcxBarrier};
    return collective(&operation, comm, stream);
}

flagcxResult_t flagcxReduce(const void *sendbuff, void *recvbuff, size_t count, flagcxDataType_t datatype,
                            flagcxRedOp_t op, int root, flagcxComm_t comm, flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxReduce, sendbuff, recvbuff, count, datatype, op, root};
    return collective(&operation, comm, stream);
}

flagcxResult_t flagcxBroadcast(const void *sendbuff, void *recvbuff, size_t count, flagcxDataType_t datatype, int root,
                               flagcxComm_t comm, flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxBroadcast, sendbuff, recvbuff, count, datatype, flagcxSum, root};
    return collective(&operation, comm, stream);
}

flagcxResult_t flagcxAllReduce(const void *sendbuff, void *recvbuff, size_t count, flagcxDataType_t datatype,
                               flagcxRedOp_t op, flagcxComm_t comm, flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxAllReduce, sendbuff, recvbuff, count, datatype, op, 0};
    return collective(&operation, comm, stream);
}

flagcxResult_t flagcxReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, flagcxDataType_t datatype,
                                   flagcxRedOp_t op, flagcxComm_t comm, flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxReduceScatter, sendbuff, recvbuff, recvcount, datatype, op, 0};
    return collective(&operation, comm, stream);
}

flagcxResult_t flagcxAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, flagcxDataType_t datatype,
                               flagcxComm_t comm, flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxAllGather, sendbuff, recvbuff, sendcount, datatype, flagcxSum, 0};
    return collective(&operation, comm, stream);
}

/* One direction of point to point; offset and count in elements. Which exchange it is shows when it runs. */
static struct transfer half(const struct operation *o, bool is_send, int peer, const void *buffer, size_t offset,
                            size_t count)
{
    size_t size = element_bytes(o->datatype);
    struct transfer transfer = {.is_send = is_send, .peer = peer, .behind = -1, .next = -1, .bytes = count * size};
    transfer.signature = signature_of(o);
    transfer.exchange = o->call != CALL_flagcxSend && o->call != CALL_flagcxRecv;
    if (transfer.bytes > 0)
        transfer.buffer = (char *)(uintptr_t)buffer + offset * size;
    return transfer;
}

static flagcxResult_t add(const struct operation *o, struct flagcxComm *comm, bool is_send, int peer,
                          const void *buffer, size_t offset)
{
    struct transfer transfer = half(o, is_send, peer, buffer, offset, o->count);
    return add_transfer(comm, &transfer);
}

/* Ends the group that a call opened for itself. */
static flagcxResult_t end_own_group(flagcxResult_t result)
{
    poison_group(result);
    flagcxResult_t end = group_end();
    return result != flagcxSuccess ? result : end;
}

static flagcxResult_t point_to_point(const struct operation *o, struct flagcxComm *comm, flagcxStream_t stream)
{
    count_call(o->call);
    flagcxResult_t result = check(o, comm, stream);
    if (result != flagcxSuccess)
        return result;
    bool is_send = o->call == CALL_flagcxSend;
    group_begin();
    result = add(o, comm, is_send, o->root, is_send ? o->send : o->receive, 0);
    return end_own_group(result);
}

flagcxResult_t flagcxSend(const void *sendbuff, size_t count, flagcxDataType_t datatype, int peer, flagcxComm_t comm,
                          flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxSend, sendbuff, NULL, count, datatype, flagcxSum, peer};
    return point_to_point(&operation, comm, stream);
}

flagcxResult_t flagcxRecv(void *recvbuff, size_t count, flagcxDataType_t datatype, int peer, flagcxComm_t comm,
                          flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxRecv, NULL, recvbuff, count, datatype, flagcxSum, peer};
    return point_to_point(&operation, comm, stream);
}

flagcxResult_t flagcxGather(const void *sendbuff, void *recvbuff, size_t count, flagcxDataType_t datatype, int root,
                            flagcxComm_t comm, flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxGather, sendbuff, recvbuff, count, datatype, flagcxSum, root};
    count_call(operation.call);
    flagcxResult_t result = check(&operation, comm, stream);
    if (result != flagcxSuccess)
        return result;
    group_begin();
    result = add_exchange(comm);
    for (int rank = 0; comm->rank == root && rank < comm->nranks && result == flagcxSuccess; rank++)
        result = add(&operation, comm, false, rank, recvbuff, (size_t)rank * count);
    if (result == flagcxSuccess)
        result = add(&operation, comm, true, root, sendbuff, 0);
    return end_own_group(result);
}

flagcxResult_t flagcxScatter(const void *sendbuff, void *recvbuff, size_t count, flagcxDataType_t datatype, int root,
                             flagcxComm_t comm, flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxScatter, sendbuff, recvbuff, count, datatype, flagcxSum, root};
    count_call(operation.call);
    flagcxResult_t result = check(&operation, comm, stream);
    if (result != flagcxSuccess)
        return result;
    group_begin();
    result = add_exchange(comm);
    for (int rank = 0; comm->rank == root && rank < comm->nranks && result == flagcxSuccess; rank++)
        result = add(&operation, comm, true, rank, sendbuff, (size_t)rank * count);
    if (result == flagcxSuccess)
        result = add(&operation, comm, false, root, recvbuff, 0);
    return end_own_group(result);
}

/* One rank's send and receive of an all-to-all. In place, received bytes stay behind those sent. */
static flagcxResult_t add_pair(struct flagcxComm *comm, const struct transfer *send, const struct transfer *receive,
                               bool skip_empty)
{
    flagcxResult_t result = flagcxSuccess;
    struct transfer last = *receive;
    if (send->bytes > 0 && send->buffer == receive->buffer)
        last.behind = next_transfer_index(comm);
    if (send->bytes > 0 || !skip_empty)
        result = add_transfer(comm, send);
    if (result == flagcxSuccess && (receive->bytes > 0 || !skip_empty))
        result = add_transfer(comm, &last);
    return result;
}

flagcxResult_t flagcxAlltoAll(const void *sendbuff, void *recvbuff, size_t count, flagcxDataType_t datatype,
                              flagcxComm_t comm, flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxAlltoAll, sendbuff, recvbuff, count, datatype, flagcxSum, 0};
    count_call(operation.call);
    flagcxResult_t result = check(&operation, comm, stream);
    if (result != flagcxSuccess)
        return result;
    group_begin();
    result = add_exchange(comm);
    for (int rank = 0; rank < comm->nranks && result == flagcxSuccess; rank++) {
        struct transfer send = half(&operation, true, rank, sendbuff, (size_t)rank * count, count);
        struct transfer receive = half(&operation, false, rank, recvbuff, (size_t)rank * count, count);
        result = add_pair(comm, &send, &receive, false);
    }
    return end_own_group(result);
}

/* Counts, displacements and the buffers that they make necessary. */
static flagcxResult_t check_uneven(struct flagcxComm *comm, const void *buffer, const size_t *counts,
                                   const size_t *displacements, const char *what)
{
    if (counts == NULL || displacements == NULL)
        return fail_call(comm, flagcxInvalidArgument, "flagcxAlltoAllv: the counts or displacements of %s are NULL",
                         what);
    for (int rank = 0; rank < comm->nranks; rank++) {
        if (counts[rank] > SIZE_MAX / 16 || displacements[rank] > SIZE_MAX / 16)
            return fail_call(comm, flagcxInvalidArgument, "flagcxAlltoAllv: %s for rank %d has count %zu and "
                                                          "displacement %zu, more than memory has addresses",
                             what, rank, counts[rank], displacements[rank]);
        if (counts[rank] > 0 && buffer == NULL)
            return fail_call(comm, flagcxInvalidArgument, "flagcxAlltoAllv: %s is NULL", what);
    }
    return flagcxSuccess;
}

/* In place works if each rank gets as many bytes where it gives them. */
static flagcxResult_t check_in_place(struct flagcxComm *comm, const size_t *sendcounts, const size_t *sdispls,
                                     const size_t *recvcounts, const size_t *rdispls)
{
    for (int rank = 0; rank < comm->nranks; rank++)
        if (sendcounts[rank] != recvcounts[rank] || sdispls[rank] != rdispls[rank])
            return fail_call(comm, flagcxInvalidUsage,
                             "flagcxAlltoAllv in place: rank %d gives %zu elements at %zu and gets %zu at %zu; both "
                             "must be equal",
                             rank, sendcounts[rank], sdispls[rank], recvcounts[rank], rdispls[rank]);
    return flagcxSuccess;
}

flagcxResult_t flagcxAlltoAllv(const void *sendbuff, size_t *sendcounts, size_t *sdispls, void *recvbuff,
                               size_t *recvcounts, size_t *rdispls, flagcxDataType_t datatype, flagcxComm_t comm,
                               flagcxStream_t stream)
{
    struct operation operation = {CALL_flagcxAlltoAllv, sendbuff, recvbuff, 0, datatype, flagcxSum, 0};
    count_call(operation.call);
    flagcxResult_t result = check(&operation, comm, stream);
    if (result != flagcxSuccess)
        return result;
    result = check_uneven(comm, sendbuff, sendcounts, sdispls, "sendbuff");
    if (result == flagcxSuccess)
        result = check_uneven(comm, recvbuff, recvcounts, rdispls, "recvbuff");
    if (result == flagcxSuccess && sendbuff == recvbuff)
        result = check_in_place(comm, sendcounts, sdispls, recvcounts, rdispls);
    if (result != flagcxSuccess)
        return poison_group(result);
    group_begin();
    result = add_exchange(comm);
    for (int rank = 0; rank < comm->nranks && result == flagcxSuccess; rank++) {
        struct transfer send = half(&operation, true, rank, sendbuff, sdispls[rank], sendcounts[rank]);
        struct transfer receive = half(&operation, false, rank, recvbuff, rdispls[rank], recvcounts[rank]);
        result = add_pair(comm, &send, &receive, true);
    }
    return end_own_group(result);
}

flagcxResult_t flagcxGroupStart(flagcxComm_t comm)
{
    (void)comm;
    count_call(CALL_flagcxGroupStart);
    group_begin();
    return flagcxSuccess;
}

flagcxResult_t flagcxGroupEnd(flagcxComm_t comm)
{
    (void)comm;
    count_call(CALL_flagcxGroupEnd);
    return group_end();
}
