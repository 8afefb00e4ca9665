/* Counting of calls: every exported flagcx* function counts itself first. */
#ifndef HOSTCX_COUNTS_H
#define HOSTCX_COUNTS_H

#define FOR_EACH_CALL(X)                                                                                     \
    X(flagcxDeviceHandleInit)                                                                                \
    X(flagcxDeviceHandleFree)                                                                                \
    X(flagcxHandleInit)                                                                                      \
    X(flagcxHandleFree)                                                                                      \
    X(flagcxGetUniqueId)                                                                                     \
    X(flagcxGetVersion)                                                                                      \
    X(flagcxGetErrorString)                                                                                  \
    X(flagcxGetLastError)                                                                                    \
    X(getFlagcxDataTypeSize)                                                                                 \
    X(flagcxMemAlloc)                                                                                        \
    X(flagcxMemFree)                                                                                         \
    X(flagcxCommRegister)                                                                                    \
    X(flagcxCommDeregister)                                                                                  \
    X(flagcxCommWindowRegister)                                                                              \
    X(flagcxCommWindowDeregister)                                                                            \
    X(flagcxCommInitRank)                                                                                    \
    X(flagcxCommFinalize)                                                                                    \
    X(flagcxCommDestroy)                                                                                     \
    X(flagcxCommAbort)                                                                                       \
    X(flagcxCommResume)                                                                                      \
    X(flagcxCommSuspend)                                                                                     \
    X(flagcxCommGetAsyncError)                                                                               \
    X(flagcxCommCount)                                                                                       \
    X(flagcxCommGetDeviceNumber)                                                                             \
    X(flagcxCommUserRank)                                                                                    \
    X(flagcxIsHomoComm)                                                                                      \
    X(flagcxBarrier)                                                                                         \
    X(flagcxReduce)                                                                                          \
    X(flagcxGather)                                                                                          \
    X(flagcxScatter)                                                                                         \
    X(flagcxBroadcast)                                                                                       \
    X(flagcxAllReduce)                                                                                       \
    X(flagcxReduceScatter)                                                                                   \
    X(flagcxAllGather)                                                                                       \
    X(flagcxAlltoAll)                                                                                        \
    X(flagcxAlltoAllv)                                                                                       \
    X(flagcxSend)                                                                                            \
    X(flagcxRecv)                                                                                            \
    X(flagcxGroupStart)                                                                                      \
    X(flagcxGroupEnd)                                                                                        \
    X(flagcxOneSideRegister)                                                                                 \
    X(flagcxOneSideSignalRegister)                                                                           \
    X(flagcxOneSideStagingRegister)                                                                          \
    X(flagcxOneSideStagingDeregister)                                                                        \
    X(flagcxGet)                                                                                             \
    X(flagcxPut)                                                                                             \
    X(flagcxBatchPut)                                                                                        \
    X(flagcxPutSignal)                                                                                       \
    X(flagcxSignal)                                                                                          \
    X(flagcxWaitSignal)                                                                                      \
    X(flagcxReadCounter)                                                                                     \
    X(flagcxWaitCounter)                                                                                     \
    X(deviceSynchronize)                                                                                     \
    X(deviceMemcpy)                                                                                          \
    X(deviceMemset)                                                                                          \
    X(deviceMalloc)                                                                                          \
    X(deviceFree)                                                                                            \
    X(setDevice)                                                                                             \
    X(getDevice)                                                                                             \
    X(getDeviceCount)                                                                                        \
    X(getVendor)                                                                                             \
    X(hostGetDevicePointer)                                                                                  \
    X(streamCreate)                                                                                          \
    X(streamDestroy)                                                                                         \
    X(streamCopy)                                                                                            \
    X(streamFree)                                                                                            \
    X(streamSynchronize)                                                                                     \
    X(streamQuery)                                                                                           \
    X(streamWaitEvent)                                                                                       \
    X(eventCreate)                                                                                           \
    X(eventDestroy)                                                                                          \
    X(eventRecord)                                                                                           \
    X(eventSynchronize)                                                                                      \
    X(eventQuery)                                                                                            \
    X(eventElapsedTime)                                                                                      \
    X(ipcMemHandleCreate)                                                                                    \
    X(ipcMemHandleGet)                                                                                       \
    X(ipcMemHandleOpen)                                                                                      \
    X(ipcMemHandleClose)                                                                                     \
    X(ipcMemHandleFree)

enum call {
#define CALL_NUMBER(name) CALL_##name,
    FOR_EACH_CALL(CALL_NUMBER)
#undef CALL_NUMBER
        NUMBER_OF_CALLS
};

/* Counts one call of the function and returns nothing; safe from any thread. */
void count_call(enum call call);

/* The function's name, for messages. */
const char *call_name(enum call call);

#endif
