/* Every function that moves no data between ranks, and every wrong argument. */
#include <stdlib.h>
#include <string.h>

#include "support.h"
#include "walks.h"

static void device_memory(flagcxDeviceHandle_t device)
{
    char *memory = NULL, copy[64], vendor[128] = "";
    int number = -1, count = -1;
    void *pointer = NULL;
    OK(device->deviceMalloc((void **)&memory, 64, flagcxMemDevice, NULL));
    OK(device->deviceMemset(memory, 7, 64, flagcxMemDevice, NULL));
    OK(device->deviceMemcpy(copy, memory, 64, flagcxMemcpyDeviceToHost, NULL));
    CHECK(copy[0] == 7 && copy[63] == 7);
    OK(device->hostGetDevicePointer(&pointer, memory));
    CHECK(pointer == memory);
    OK(device->deviceFree(memory, flagcxMemDevice, NULL));
    OK(device->deviceSynchronize());
    OK(device->setDevice(0));
    CHECK_RESULT(device->setDevice(1), flagcxUnhandledDeviceError);
    OK(device->getDevice(&number));
    OK(device->getDeviceCount(&count));
    OK(device->getVendor(vendor));
    CHECK(number == 0 && count == 1 && strcmp(vendor, "HOST") == 0);
    CHECK_RESULT(device->getVendor(NULL), flagcxInvalidArgument);
    CHECK_RESULT(device->deviceMalloc(NULL, 64, flagcxMemHost, NULL), flagcxInvalidArgument);
    CHECK_RESULT(device->deviceMemcpy(NULL, copy, 1, flagcxMemcpyDeviceToDevice, NULL), flagcxInvalidArgument);
    CHECK_RESULT(device->deviceMemset(NULL, 0, 1, flagcxMemHost, NULL), flagcxInvalidArgument);
}

static void device_streams(flagcxDeviceHandle_t device)
{
    flagcxStream_t created = NULL, boxed = NULL;
    flagcxEvent_t start = NULL, end = NULL;
    float milliseconds = -1;
    OK(device->streamCreate(&created));
    OK(device->streamCopy(&boxed, (void *)(uintptr_t)0x1234));
    CHECK(created != NULL && boxed != NULL && created != boxed);
    OK(device->streamSynchronize(boxed));
    OK(device->streamQuery(boxed));
    OK(device->eventCreate(&start, flagcxEventDefault));
    OK(device->eventCreate(&end, flagcxEventDisableTiming));
    OK(device->eventRecord(start, created));
    OK(device->eventRecord(end, created));
    OK(device->streamWaitEvent(created, end));
    OK(device->eventSynchronize(end));
    OK(device->eventQuery(end));
    OK(device->eventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds >= 0);
    OK(device->eventDestroy(start));
    OK(device->eventDestroy(end));
    OK(device->streamFree(boxed));
    OK(device->streamDestroy(created));
    CHECK_RESULT(device->streamCopy(NULL, NULL), flagcxInvalidArgument);
    CHECK_RESULT(device->eventRecord(NULL, NULL), flagcxInvalidArgument);
}

static void device_ipc(flagcxDeviceHandle_t device)
{
    flagcxIpcMemHandle_t handle = NULL;
    size_t bytes = 0;
    void *pointer = NULL;
    CHECK_RESULT(device->ipcMemHandleCreate(&handle, &bytes), flagcxNotSupported);
    CHECK_RESULT(device->ipcMemHandleGet(handle, pointer), flagcxNotSupported);
    CHECK_RESULT(device->ipcMemHandleOpen(handle, &pointer), flagcxNotSupported);
    CHECK_RESULT(device->ipcMemHandleClose(pointer), flagcxNotSupported);
    CHECK_RESULT(device->ipcMemHandleFree(handle), flagcxNotSupported);
}

static void library(void)
{
    flagcxDeviceHandle_t device = NULL;
    flagcxHandlerGroup_t group = NULL;
    int version = 0;
    OK(flagcxDeviceHandleInit(&device));
    device_memory(device);
    device_streams(device);
    device_ipc(device);
    OK(flagcxDeviceHandleFree(device));
    OK(flagcxDeviceHandleFree(NULL));
    OK(flagcxHandleInit(&group));
    CHECK(group->devHandle != NULL && group->devHandle->getVendor != NULL && group->comm == NULL);
    OK(flagcxHandleFree(group));
    OK(flagcxHandleFree(NULL));
    CHECK_RESULT(flagcxDeviceHandleInit(NULL), flagcxInvalidArgument);
    CHECK_RESULT(flagcxHandleInit(NULL), flagcxInvalidArgument);
    OK(flagcxGetVersion(&version));
    CHECK(version > 0);
    for (int code = 0; code < flagcxNumResults; code++)
        CHECK(strlen(flagcxGetErrorString((flagcxResult_t)code)) > 0);
    CHECK(strcmp(flagcxGetErrorString((flagcxResult_t)77), "unknown result code") == 0);
    CHECK(getFlagcxDataTypeSize(flagcxBfloat16) == 2 && getFlagcxDataTypeSize(flagcxInt64) == 8);
    CHECK(getFlagcxDataTypeSize((flagcxDataType_t)10) == 0);
}

static void memory(void)
{
    char *pointer = NULL;
    OK(flagcxMemAlloc((void **)&pointer, 100, flagcxMemCCL));
    pointer[99] = 1;
    OK(flagcxMemFree(pointer, flagcxMemCCL));
    OK(flagcxMemFree(NULL, flagcxMemCCL));
    CHECK_RESULT(flagcxMemAlloc((void **)&pointer, 0, flagcxMemCCL), flagcxInvalidArgument);
    CHECK_RESULT(flagcxMemAlloc(NULL, 8, flagcxMemCCL), flagcxInvalidArgument);
    CHECK_RESULT(flagcxMemAlloc((void **)&pointer, 8, flagcxMemSHMEM), flagcxInternalError);
}

static void registration(struct rank *r)
{
    char buffer[64];
    void *handle = NULL, *loose = NULL;
    flagcxWindow_t window = NULL;
    OK(flagcxCommRegister(r->comm, buffer, sizeof buffer, &handle, flagcxMemCCL));
    CHECK(handle != NULL);
    OK(flagcxCommDeregister(r->comm, handle, flagcxMemCCL));
    CHECK_RESULT(flagcxCommDeregister(r->comm, handle, flagcxMemCCL), flagcxInvalidArgument);
    OK(flagcxCommDeregister(r->comm, NULL, flagcxMemCCL));
    CHECK_RESULT(flagcxCommRegister(r->comm, NULL, 8, &handle, flagcxMemCCL), flagcxInvalidArgument);
    CHECK_RESULT(flagcxCommRegister(r->comm, buffer, 0, &handle, flagcxMemCCL), flagcxInvalidArgument);
    OK(flagcxCommRegister(NULL, buffer, sizeof buffer, &loose, flagcxMemCCL));
    OK(flagcxCommDeregister(NULL, loose, flagcxMemCCL));
    OK(flagcxCommWindowRegister(r->comm, buffer, sizeof buffer, &window, FLAGCX_WIN_COLL_SYMMETRIC, flagcxMemCCL));
    CHECK(window != NULL);
    /* The window must be NULL on entry. */
    CHECK_RESULT(flagcxCommWindowRegister(r->comm, buffer, sizeof buffer, &window, 0, flagcxMemCCL),
                 flagcxInvalidArgument);
    OK(flagcxCommWindowDeregister(r->comm, window, flagcxMemCCL));
    CHECK_RESULT(flagcxCommWindowDeregister(r->comm, window, flagcxMemCCL), flagcxInvalidArgument);
    window = NULL;
    OK(flagcxCommWindowDeregister(r->comm, NULL, flagcxMemCCL));
    CHECK_RESULT(flagcxCommWindowRegister(NULL, buffer, 8, &window, 0, flagcxMemCCL), flagcxInternalError);
    CHECK_RESULT(flagcxCommWindowRegister(r->comm, buffer, 8, NULL, 0, flagcxMemCCL), flagcxInvalidArgument);
}

static void questions(struct rank *r)
{
    int number = -1;
    flagcxResult_t error = flagcxInProgress;
    OK(flagcxCommCount(r->comm, &number));
    CHECK(number == r->nranks);
    OK(flagcxCommUserRank(r->comm, &number));
    CHECK(number == r->rank);
    OK(flagcxCommGetDeviceNumber(r->comm, &number));
    CHECK(number == 0);
    OK(flagcxIsHomoComm(r->comm, &number));
    CHECK(number == 1);
    OK(flagcxCommGetAsyncError(r->comm, &error));
    CHECK(error == flagcxSuccess);
    CHECK_RESULT(flagcxCommCount(NULL, &number), flagcxInternalError);
    CHECK_RESULT(flagcxCommCount(r->comm, NULL), flagcxInvalidArgument);
    CHECK_RESULT(flagcxCommGetAsyncError(NULL, &error), flagcxInternalError);
    CHECK_RESULT(flagcxCommResume(r->comm), flagcxInvalidUsage);
    CHECK_RESULT(flagcxCommSuspend(r->comm), flagcxInvalidUsage);
    OK(flagcxCommFinalize(r->comm));
    CHECK(flagcxGetLastError(r->comm) != NULL);
}

static void one_sided(struct rank *r)
{
    char buffer[8];
    size_t zero = 0;
    int index = 0;
    uint64_t counter;
    CHECK_RESULT(flagcxOneSideRegister(r->comm, buffer, 8), flagcxNotSupported);
    OK(flagcxOneSideSignalRegister(r->comm, buffer, 8, 0));
    OK(flagcxOneSideStagingRegister(r->comm, buffer, 8));
    CHECK_RESULT(flagcxOneSideStagingDeregister(r->comm), flagcxInternalError);
    CHECK_RESULT(flagcxGet(r->comm, 0, 0, 0, 8, 0, 0), flagcxInvalidArgument);
    CHECK_RESULT(flagcxPut(r->comm, 0, 0, 0, 8, 0, 0), flagcxInvalidArgument);
    CHECK_RESULT(flagcxBatchPut(r->comm, 0, &zero, &zero, &zero, &index, &index, 1), flagcxInvalidArgument);
    CHECK_RESULT(flagcxPutSignal(buffer, 8, flagcxInt8, 0, NULL, 0, 0, r->comm, r->stream), flagcxInvalidArgument);
    CHECK_RESULT(flagcxSignal(0, 0, r->comm, r->stream), flagcxInvalidArgument);
    OK(flagcxWaitSignal(0, NULL, r->comm, r->stream));
    CHECK_RESULT(flagcxWaitSignal(1, NULL, r->comm, r->stream), flagcxInvalidArgument);
    CHECK_RESULT(flagcxReadCounter(r->comm, &counter), flagcxInvalidArgument);
    CHECK_RESULT(flagcxWaitCounter(r->comm, 0), flagcxInvalidArgument);
}

#define IS_INVALID(call) CHECK_RESULT(call, flagcxInvalidArgument)

static void wrong_numbers(struct rank *r, void *buffer)
{
    flagcxComm_t comm = r->comm;
    flagcxStream_t stream = r->stream;
    size_t ones[MOST_RANKS] = {1, 1, 1, 1, 1, 1, 1, 1}, zeros[MOST_RANKS] = {0}, huge[MOST_RANKS] = {SIZE_MAX / 2};
    for (int bad = -1; bad <= 10; bad += 11) {
        flagcxDataType_t type = (flagcxDataType_t)bad;
        IS_INVALID(flagcxAllReduce(buffer, buffer, 1, type, flagcxSum, comm, stream));
        IS_INVALID(flagcxReduce(buffer, buffer, 1, type, flagcxSum, 0, comm, stream));
        IS_INVALID(flagcxReduceScatter(buffer, buffer, 1, type, flagcxSum, comm, stream));
        IS_INVALID(flagcxAllGather(buffer, buffer, 1, type, comm, stream));
        IS_INVALID(flagcxBroadcast(buffer, buffer, 1, type, 0, comm, stream));
        IS_INVALID(flagcxGather(buffer, buffer, 1, type, 0, comm, stream));
        IS_INVALID(flagcxScatter(buffer, buffer, 1, type, 0, comm, stream));
        IS_INVALID(flagcxAlltoAll(buffer, buffer, 1, type, comm, stream));
        IS_INVALID(flagcxAlltoAllv(buffer, ones, zeros, buffer, ones, zeros, type, comm, stream));
        IS_INVALID(flagcxSend(buffer, 1, type, 0, comm, stream));
        IS_INVALID(flagcxRecv(buffer, 1, type, 0, comm, stream));
    }
    for (int bad = -1; bad <= 5; bad += 6) {
        flagcxRedOp_t op = (flagcxRedOp_t)bad;
        IS_INVALID(flagcxAllReduce(buffer, buffer, 1, flagcxInt8, op, comm, stream));
        IS_INVALID(flagcxReduce(buffer, buffer, 1, flagcxInt8, op, 0, comm, stream));
        IS_INVALID(flagcxReduceScatter(buffer, buffer, 1, flagcxInt8, op, comm, stream));
    }
    for (int bad = -1; bad <= r->nranks; bad += r->nranks + 1) {
        IS_INVALID(flagcxReduce(buffer, buffer, 1, flagcxInt8, flagcxSum, bad, comm, stream));
        IS_INVALID(flagcxBroadcast(buffer, buffer, 1, flagcxInt8, bad, comm, stream));
        IS_INVALID(flagcxGather(buffer, buffer, 1, flagcxInt8, bad, comm, stream));
        IS_INVALID(flagcxScatter(buffer, buffer, 1, flagcxInt8, bad, comm, stream));
        IS_INVALID(flagcxSend(buffer, 1, flagcxInt8, bad, comm, stream));
        IS_INVALID(flagcxRecv(buffer, 1, flagcxInt8, bad, comm, stream));
    }
    IS_INVALID(flagcxAllReduce(buffer, buffer, SIZE_MAX, flagcxInt8, flagcxSum, comm, stream));
    IS_INVALID(flagcxAlltoAllv(buffer, huge, zeros, buffer, ones, zeros, flagcxInt8, comm, stream));
    IS_INVALID(flagcxAlltoAllv(buffer, NULL, zeros, buffer, ones, zeros, flagcxInt8, comm, stream));
    IS_INVALID(flagcxAlltoAllv(NULL, ones, zeros, buffer, ones, zeros, flagcxInt8, comm, stream));
    CHECK_RESULT(flagcxAlltoAllv(buffer, ones, zeros, buffer, ones, ones, flagcxInt8, comm, stream),
                 flagcxInvalidUsage);
}

static void wrong_pointers(struct rank *r, void *buffer)
{
    IS_INVALID(flagcxAllReduce(NULL, buffer, 1, flagcxInt8, flagcxSum, r->comm, r->stream));
    IS_INVALID(flagcxAllReduce(buffer, NULL, 1, flagcxInt8, flagcxSum, r->comm, r->stream));
    IS_INVALID(flagcxAllReduce(buffer, buffer, 1, flagcxInt8, flagcxSum, r->comm, NULL));
    IS_INVALID(flagcxReduce(buffer, NULL, 1, flagcxInt8, flagcxSum, r->rank, r->comm, r->stream));
    IS_INVALID(flagcxBroadcast(NULL, buffer, 1, flagcxInt8, r->rank, r->comm, r->stream));
    IS_INVALID(flagcxSend(NULL, 1, flagcxInt8, 0, r->comm, r->stream));
    IS_INVALID(flagcxRecv(NULL, 1, flagcxInt8, 0, r->comm, r->stream));
    IS_INVALID(flagcxBarrier(r->comm, NULL));
    CHECK(strstr(flagcxGetLastError(r->comm), "stream") != NULL);
}

#define HAS_NO_COMMUNICATOR(call) CHECK_RESULT(call, flagcxInternalError)

static void no_communicator(struct rank *r, void *buffer)
{
    size_t ones[MOST_RANKS] = {1}, zeros[MOST_RANKS] = {0};
    HAS_NO_COMMUNICATOR(flagcxBarrier(NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxAllReduce(buffer, buffer, 1, flagcxInt8, flagcxSum, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxReduce(buffer, buffer, 1, flagcxInt8, flagcxSum, 0, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxReduceScatter(buffer, buffer, 1, flagcxInt8, flagcxSum, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxAllGather(buffer, buffer, 1, flagcxInt8, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxBroadcast(buffer, buffer, 1, flagcxInt8, 0, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxGather(buffer, buffer, 1, flagcxInt8, 0, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxScatter(buffer, buffer, 1, flagcxInt8, 0, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxAlltoAll(buffer, buffer, 1, flagcxInt8, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxAlltoAllv(buffer, ones, zeros, buffer, ones, zeros, flagcxInt8, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxSend(buffer, 1, flagcxInt8, 0, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxRecv(buffer, 1, flagcxInt8, 0, NULL, r->stream));
    HAS_NO_COMMUNICATOR(flagcxCommDestroy(NULL));
    HAS_NO_COMMUNICATOR(flagcxCommAbort(NULL));
    HAS_NO_COMMUNICATOR(flagcxCommFinalize(NULL));
    CHECK(strstr(flagcxGetLastError(NULL), "NULL") != NULL);
}

static void with_communicator(struct rank *r)
{
    char buffer[64] = {0};
    float value = 1;
    registration(r);
    questions(r);
    one_sided(r);
    wrong_numbers(r, buffer);
    wrong_pointers(r, buffer);
    no_communicator(r, buffer);
    /* Nothing of this was started: the communicator works as before. */
    OK(flagcxAllReduce(&value, &value, 1, flagcxFloat32, flagcxSum, r->comm, r->stream));
    CHECK(value == (float)r->nranks);
}

static void used_after_its_end(struct rank *r)
{
    flagcxComm_t comm = NULL;
    int number;
    float value = 1;
    OK(flagcxCommInitRank(&comm, r->nranks, &r->id, r->rank));
    OK(flagcxBarrier(comm, r->stream));
    OK(flagcxCommDestroy(comm));
    IS_INVALID(flagcxCommDestroy(comm));
    IS_INVALID(flagcxCommAbort(comm));
    IS_INVALID(flagcxCommCount(comm, &number));
    IS_INVALID(flagcxAllReduce(&value, &value, 1, flagcxFloat32, flagcxSum, comm, r->stream));
    CHECK(flagcxGetLastError(comm) != NULL);
}

void walk_interface(int nranks)
{
    library();
    memory();
    run_ranks(nranks, with_communicator, NULL);
    run_ranks_bare(nranks, used_after_its_end, NULL);
}
