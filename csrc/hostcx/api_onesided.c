/* FlagCX's one-sided operations: answered as FlagCX answers them where all ranks have one vendor's device,
 * which has no such operations. Registrations for them succeed or are refused; nothing ever moves. */
#include "communicator.h"
#include "counts.h"

static flagcxResult_t not_here(enum call call, flagcxComm_t comm, flagcxResult_t code)
{
    return fail_call(comm, code, "%s: one-sided operations exist between devices of several vendors only",
                     call_name(call));
}

/* FlagCX checks for the missing engine first, and calls that an invalid argument. */
static flagcxResult_t no_engine(enum call call, flagcxComm_t comm)
{
    count_call(call);
    return not_here(call, comm, flagcxInvalidArgument);
}

static flagcxResult_t nothing_to_register(enum call call, flagcxComm_t comm)
{
    count_call(call);
    return communicator_check(comm);
}

flagcxResult_t flagcxOneSideRegister(flagcxComm_t comm, void *buffer, size_t bytes)
{
    (void)buffer;
    (void)bytes;
    flagcxResult_t result = nothing_to_register(CALL_flagcxOneSideRegister, comm);
    return result != flagcxSuccess ? result : not_here(CALL_flagcxOneSideRegister, comm, flagcxNotSupported);
}

flagcxResult_t flagcxOneSideSignalRegister(const flagcxComm_t comm, void *buffer, size_t bytes, int pointerType)
{
    (void)buffer;
    (void)bytes;
    (void)pointerType;
    return nothing_to_register(CALL_flagcxOneSideSignalRegister, comm);
}

flagcxResult_t flagcxOneSideStagingRegister(const flagcxComm_t comm, void *buffer, size_t bytes)
{
    (void)buffer;
    (void)bytes;
    return nothing_to_register(CALL_flagcxOneSideStagingRegister, comm);
}

flagcxResult_t flagcxOneSideStagingDeregister(const flagcxComm_t comm)
{
    count_call(CALL_flagcxOneSideStagingDeregister);
    return not_here(CALL_flagcxOneSideStagingDeregister, comm, flagcxInternalError);
}

flagcxResult_t flagcxGet(flagcxComm_t comm, int peer, size_t sourceOffset, size_t destinationOffset, size_t bytes,
                         int sourceIndex, int destinationIndex)
{
    (void)peer, (void)sourceOffset, (void)destinationOffset, (void)bytes, (void)sourceIndex, (void)destinationIndex;
    return no_engine(CALL_flagcxGet, comm);
}

flagcxResult_t flagcxPut(flagcxComm_t comm, int peer, size_t sourceOffset, size_t destinationOffset, size_t bytes,
                         int sourceIndex, int destinationIndex)
{
    (void)peer, (void)sourceOffset, (void)destinationOffset, (void)bytes, (void)sourceIndex, (void)destinationIndex;
    return no_engine(CALL_flagcxPut, comm);
}

flagcxResult_t flagcxBatchPut(flagcxComm_t comm, int peer, const size_t *sourceOffsets,
                              const size_t *destinationOffsets, const size_t *bytes, const int *sourceIndexes,
                              const int *destinationIndexes, size_t count)
{
    (void)peer, (void)sourceOffsets, (void)destinationOffsets, (void)bytes, (void)sourceIndexes;
    (void)destinationIndexes, (void)count;
    return no_engine(CALL_flagcxBatchPut, comm);
}

flagcxResult_t flagcxPutSignal(const void *buffer, size_t count, flagcxDataType_t datatype, int peer,
                               flagcxWindow_t peerWindow, size_t peerOffset, unsigned int flags, flagcxComm_t comm,
                               flagcxStream_t stream)
{
    (void)buffer, (void)count, (void)datatype, (void)peer, (void)peerWindow, (void)peerOffset, (void)flags;
    (void)stream;
    return no_engine(CALL_flagcxPutSignal, comm);
}

flagcxResult_t flagcxSignal(int peer, unsigned int flags, flagcxComm_t comm, flagcxStream_t stream)
{
    (void)peer, (void)flags, (void)stream;
    return no_engine(CALL_flagcxSignal, comm);
}

/* Waiting for nothing succeeds, before anything else is looked at. */
flagcxResult_t flagcxWaitSignal(int count, const flagcxWaitSignalDesc_t *signals, flagcxComm_t comm,
                                flagcxStream_t stream)
{
    (void)signals, (void)stream;
    if (count != 0)
        return no_engine(CALL_flagcxWaitSignal, comm);
    count_call(CALL_flagcxWaitSignal);
    return flagcxSuccess;
}

flagcxResult_t flagcxReadCounter(flagcxComm_t comm, uint64_t *count)
{
    (void)count;
    return no_engine(CALL_flagcxReadCounter, comm);
}

flagcxResult_t flagcxWaitCounter(flagcxComm_t comm, uint64_t target)
{
    (void)target;
    return no_engine(CALL_flagcxWaitCounter, comm);
}
