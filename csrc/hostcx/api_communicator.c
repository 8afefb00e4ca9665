/* FlagCX's functions about communicators, the library and its errors. */
#include "communicator.h"
#include "counts.h"
#include "reduce.h"

/* What FlagCX's own flagcxGetVersion has answered in every release so far. */
enum { FLAGCX_ANSWER_TO_VERSION = 10000 };

size_t getFlagcxDataTypeSize(flagcxDataType_t datatype)
{
    count_call(CALL_getFlagcxDataTypeSize);
    return element_bytes(datatype);
}

flagcxResult_t flagcxGetVersion(int *version)
{
    count_call(CALL_flagcxGetVersion);
    if (version == NULL)
        return fail(flagcxInvalidArgument, "flagcxGetVersion: the pointer is NULL");
    *version = FLAGCX_ANSWER_TO_VERSION;
    return flagcxSuccess;
}

flagcxResult_t flagcxGetUniqueId(flagcxUniqueId_t id)
{
    count_call(CALL_flagcxGetUniqueId);
    announce();
    if (id == NULL)
        return fail(flagcxInvalidArgument, "flagcxGetUniqueId: the pointer is NULL");
    return segment_create(id);
}

flagcxResult_t flagcxCommInitRank(flagcxComm_t *comm, int nranks, flagcxUniqueId_t id, int rank)
{
    count_call(CALL_flagcxCommInitRank);
    announce();
    if (comm == NULL || id == NULL)
        return fail(flagcxInvalidArgument, "flagcxCommInitRank: the pointer to the %s is NULL",
                    comm == NULL ? "communicator" : "unique id");
    *comm = NULL;
    if (nranks < 1 || rank < 0 || rank >= nranks)
        return fail(flagcxInvalidArgument, "flagcxCommInitRank: rank %d of nranks=%d; a rank lies between 0 and "
                                           "nranks - 1",
                    rank, nranks);
    flagcxResult_t result = communicator_join(id, nranks, rank, comm);
    if (result != flagcxSuccess)
        tell("%s", last_error_of_thread());
    return result;
}

/* Nothing is in flight between calls; the handle stays valid until it is destroyed. */
flagcxResult_t flagcxCommFinalize(flagcxComm_t comm)
{
    count_call(CALL_flagcxCommFinalize);
    return communicator_check(comm);
}

flagcxResult_t flagcxCommDestroy(flagcxComm_t comm)
{
    count_call(CALL_flagcxCommDestroy);
    return communicator_end(comm, RANK_LEFT);
}

flagcxResult_t flagcxCommAbort(flagcxComm_t comm)
{
    count_call(CALL_flagcxCommAbort);
    return communicator_end(comm, RANK_ABORTED);
}

static flagcxResult_t not_over_nccl(flagcxComm_t comm, enum call call)
{
    count_call(call);
    flagcxResult_t result = communicator_check(comm);
    if (result != flagcxSuccess)
        return result;
    return fail_call(comm, flagcxInvalidUsage, "%s: not possible, as with FlagCX over NCCL", call_name(call));
}

flagcxResult_t flagcxCommResume(flagcxComm_t comm) { return not_over_nccl(comm, CALL_flagcxCommResume); }

flagcxResult_t flagcxCommSuspend(flagcxComm_t comm) { return not_over_nccl(comm, CALL_flagcxCommSuspend); }

/* The check of a question: an error of the communicator is no reason not to answer. */
static flagcxResult_t check_question(struct flagcxComm *comm, const void *answer, enum call call)
{
    count_call(call);
    flagcxResult_t result = communicator_check_handle(comm);
    if (result != flagcxSuccess)
        return result;
    if (answer == NULL)
        return fail_call(comm, flagcxInvalidArgument, "%s: the pointer is NULL", call_name(call));
    return flagcxSuccess;
}

flagcxResult_t flagcxCommGetAsyncError(flagcxComm_t comm, flagcxResult_t *asyncError)
{
    flagcxResult_t result = check_question(comm, asyncError, CALL_flagcxCommGetAsyncError);
    if (result == flagcxSuccess)
        *asyncError = communicator_async_error(comm);
    return result;
}

flagcxResult_t flagcxCommCount(const flagcxComm_t comm, int *count)
{
    flagcxResult_t result = check_question(comm, count, CALL_flagcxCommCount);
    if (result == flagcxSuccess)
        *count = comm->nranks;
    return result;
}

flagcxResult_t flagcxCommGetDeviceNumber(const flagcxComm_t comm, int *device)
{
    flagcxResult_t result = check_question(comm, device, CALL_flagcxCommGetDeviceNumber);
    if (result == flagcxSuccess)
        *device = 0;
    return result;
}

flagcxResult_t flagcxCommUserRank(const flagcxComm_t comm, int *rank)
{
    flagcxResult_t result = check_question(comm, rank, CALL_flagcxCommUserRank);
    if (result == flagcxSuccess)
        *rank = comm->rank;
    return result;
}

flagcxResult_t flagcxIsHomoComm(flagcxComm_t comm, int *isHomo)
{
    flagcxResult_t result = check_question(comm, isHomo, CALL_flagcxIsHomoComm);
    if (result == flagcxSuccess)
        *isHomo = 1;
    return result;
}

/* Of a communicator, its last error; without one, that of the calling thread. The words stay until the
 * thread asks again or fails again. */
const char *flagcxGetLastError(flagcxComm_t comm)
{
    count_call(CALL_flagcxGetLastError);
    return comm != NULL ? communicator_last_error(comm) : last_error_of_thread();
}
