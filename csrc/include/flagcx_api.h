/* FlagCX's C API as a binary interface: what both the binding and hostcx are compiled against.
 *
 * Written by hand from FlagCX's public interface (head of 2026-08, which calls itself 0.13.0).
 * Only declarations: including this file needs no FlagCX, and nothing here is linked.
 *
 * FLAGCX_API         what stands before each prototype (a visibility attribute, for a library).
 * FLAGCX_API_LEGACY  defined: the form of 0.11 and 0.12. No flagcxDeviceHandleInit/Free, the unique
 *                    id is handed over as a pointer to a pointer, and no allocator argument exists.
 *
 * Entries 0 to 16 of the device handle and everything that is not marked below are the same from
 * 0.7.0 on. A binding that does not know the release uses those alone.
 */
#ifndef SGLANG_FL_FLAGCX_API_H
#define SGLANG_FL_FLAGCX_API_H

#include <stddef.h>
#include <stdint.h>

#ifndef FLAGCX_API
#define FLAGCX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define FLAGCX_UNIQUE_ID_BYTES 256

/* Window flags. */
#define FLAGCX_WIN_DEFAULT 0x00
#define FLAGCX_WIN_COLL_SYMMETRIC 0x01

typedef enum {
    flagcxSuccess = 0,
    flagcxUnhandledDeviceError = 1,
    flagcxSystemError = 2,
    flagcxInternalError = 3,
    flagcxInvalidArgument = 4,
    flagcxInvalidUsage = 5,
    flagcxRemoteError = 6,
    flagcxInProgress = 7,
    flagcxUnhandledCCLError = 8,
    flagcxNotSupported = 9,
    flagcxNumResults = 10
} flagcxResult_t;

typedef enum {
    flagcxInt8 = 0,
    flagcxChar = 0,
    flagcxUint8 = 1,
    flagcxInt32 = 2,
    flagcxInt = 2,
    flagcxUint32 = 3,
    flagcxInt64 = 4,
    flagcxUint64 = 5,
    flagcxFloat16 = 6,
    flagcxHalf = 6,
    flagcxFloat32 = 7,
    flagcxFloat = 7,
    flagcxFloat64 = 8,
    flagcxDouble = 8,
    flagcxBfloat16 = 9,
    flagcxNumTypes = 10
} flagcxDataType_t;

typedef enum {
    flagcxSum = 0,
    flagcxProd = 1,
    flagcxMax = 2,
    flagcxMin = 3,
    flagcxAvg = 4,
    flagcxRedNoOp = 5,
    flagcxNumRedOps = 5,
    flagcxMaxRedOp = 0x7fffffff
} flagcxRedOp_t;

typedef enum {
    flagcxMemcpyHostToDevice = 0,
    flagcxMemcpyDeviceToHost = 1,
    flagcxMemcpyDeviceToDevice = 2
} flagcxMemcpyType_t;

typedef enum { flagcxMemHost = 0, flagcxMemDevice = 1, flagcxMemManaged = 2 } flagcxMemType_t;

typedef enum { flagcxEventDefault = 0, flagcxEventDisableTiming = 1 } flagcxEventType_t;

typedef enum { flagcxMemCCL = 0, flagcxMemSHMEM = 1 } flagcxMemAllocator_t;

typedef struct {
    char internal[FLAGCX_UNIQUE_ID_BYTES];
} flagcxUniqueId;
typedef flagcxUniqueId *flagcxUniqueId_t;

/* Opaque to every caller. A flagcxStream_t is a box: streamCopy puts a raw stream into one. */
typedef struct flagcxComm *flagcxComm_t;
typedef struct flagcxStream *flagcxStream_t;
typedef struct flagcxEvent *flagcxEvent_t;
typedef struct flagcxIpcMemHandle *flagcxIpcMemHandle_t;
typedef struct flagcxWindow *flagcxWindow_t;

struct flagcxDeviceHandle {
    /* 0 to 9: the device and its memory */
    flagcxResult_t (*deviceSynchronize)(void);
    flagcxResult_t (*deviceMemcpy)(void *destination, void *source, size_t bytes, flagcxMemcpyType_t type,
                                   flagcxStream_t stream);
    flagcxResult_t (*deviceMemset)(void *pointer, int value, size_t bytes, flagcxMemType_t type,
                                   flagcxStream_t stream);
    flagcxResult_t (*deviceMalloc)(void **pointer, size_t bytes, flagcxMemType_t type, flagcxStream_t stream);
    flagcxResult_t (*deviceFree)(void *pointer, flagcxMemType_t type, flagcxStream_t stream);
    flagcxResult_t (*setDevice)(int device);
    flagcxResult_t (*getDevice)(int *device);
    flagcxResult_t (*getDeviceCount)(int *count);
    /* vendor: room for 128 bytes */
    flagcxResult_t (*getVendor)(char *vendor);
    flagcxResult_t (*hostGetDevicePointer)(void **devicePointer, void *hostPointer);
    /* 10 to 16: streams. rawStream is the raw stream itself (before 0.7.0: its address). */
    flagcxResult_t (*streamCreate)(flagcxStream_t *stream);
    flagcxResult_t (*streamDestroy)(flagcxStream_t stream);
    flagcxResult_t (*streamCopy)(flagcxStream_t *stream, void *rawStream);
    flagcxResult_t (*streamFree)(flagcxStream_t stream);
    flagcxResult_t (*streamSynchronize)(flagcxStream_t stream);
    flagcxResult_t (*streamQuery)(flagcxStream_t stream);
    flagcxResult_t (*streamWaitEvent)(flagcxStream_t stream, flagcxEvent_t event);
    /* 17 and on moved between releases: a binding leaves them alone. */
    flagcxResult_t (*eventCreate)(flagcxEvent_t *event, flagcxEventType_t type);
    flagcxResult_t (*eventDestroy)(flagcxEvent_t event);
    flagcxResult_t (*eventRecord)(flagcxEvent_t event, flagcxStream_t stream);
    flagcxResult_t (*eventSynchronize)(flagcxEvent_t event);
    flagcxResult_t (*eventQuery)(flagcxEvent_t event);
#ifndef FLAGCX_API_LEGACY
    flagcxResult_t (*eventElapsedTime)(float *milliseconds, flagcxEvent_t start, flagcxEvent_t end);
#endif
    flagcxResult_t (*ipcMemHandleCreate)(flagcxIpcMemHandle_t *handle, size_t *bytes);
    flagcxResult_t (*ipcMemHandleGet)(flagcxIpcMemHandle_t handle, void *devicePointer);
    flagcxResult_t (*ipcMemHandleOpen)(flagcxIpcMemHandle_t handle, void **devicePointer);
    flagcxResult_t (*ipcMemHandleClose)(void *devicePointer);
    flagcxResult_t (*ipcMemHandleFree)(flagcxIpcMemHandle_t handle);
};
typedef struct flagcxDeviceHandle *flagcxDeviceHandle_t;

struct flagcxHandlerGroup {
    flagcxUniqueId_t uniqueId;
    flagcxComm_t comm;
    flagcxDeviceHandle_t devHandle;
};
typedef struct flagcxHandlerGroup *flagcxHandlerGroup_t;

typedef struct {
    uint64_t opCnt;
    int peer;
} flagcxWaitSignalDesc_t;

/* What differs between the two forms. */
#ifdef FLAGCX_API_LEGACY
FLAGCX_API flagcxResult_t flagcxGetUniqueId(flagcxUniqueId_t *uniqueId);
FLAGCX_API flagcxResult_t flagcxMemAlloc(void **pointer, size_t bytes);
FLAGCX_API flagcxResult_t flagcxMemFree(void *pointer);
FLAGCX_API flagcxResult_t flagcxCommRegister(const flagcxComm_t comm, void *buffer, size_t bytes, void **handle);
FLAGCX_API flagcxResult_t flagcxCommDeregister(const flagcxComm_t comm, void *handle);
FLAGCX_API flagcxResult_t flagcxCommWindowRegister(flagcxComm_t comm, void *buffer, size_t bytes,
                                                   flagcxWindow_t *window, int flags);
FLAGCX_API flagcxResult_t flagcxCommWindowDeregister(flagcxComm_t comm, flagcxWindow_t window);
#else
FLAGCX_API flagcxResult_t flagcxDeviceHandleInit(flagcxDeviceHandle_t *handle);
FLAGCX_API flagcxResult_t flagcxDeviceHandleFree(flagcxDeviceHandle_t handle);
FLAGCX_API flagcxResult_t flagcxGetUniqueId(flagcxUniqueId_t uniqueId);
FLAGCX_API flagcxResult_t flagcxMemAlloc(void **pointer, size_t bytes, flagcxMemAllocator_t allocator);
FLAGCX_API flagcxResult_t flagcxMemFree(void *pointer, flagcxMemAllocator_t allocator);
FLAGCX_API flagcxResult_t flagcxCommRegister(const flagcxComm_t comm, void *buffer, size_t bytes, void **handle,
                                             flagcxMemAllocator_t allocator);
FLAGCX_API flagcxResult_t flagcxCommDeregister(const flagcxComm_t comm, void *handle,
                                               flagcxMemAllocator_t allocator);
/* *window must be NULL on entry. */
FLAGCX_API flagcxResult_t flagcxCommWindowRegister(flagcxComm_t comm, void *buffer, size_t bytes,
                                                   flagcxWindow_t *window, int flags,
                                                   flagcxMemAllocator_t allocator);
FLAGCX_API flagcxResult_t flagcxCommWindowDeregister(flagcxComm_t comm, flagcxWindow_t window,
                                                     flagcxMemAllocator_t allocator);
#endif

FLAGCX_API flagcxResult_t flagcxHandleInit(flagcxHandlerGroup_t *handler);
FLAGCX_API flagcxResult_t flagcxHandleFree(flagcxHandlerGroup_t handler);

FLAGCX_API size_t getFlagcxDataTypeSize(flagcxDataType_t datatype);
FLAGCX_API flagcxResult_t flagcxGetVersion(int *version);
FLAGCX_API const char *flagcxGetErrorString(flagcxResult_t result);
FLAGCX_API const char *flagcxGetLastError(flagcxComm_t comm);

/* Communicators. flagcxCommInitRank is called by all ranks and blocks until all have come. */
FLAGCX_API flagcxResult_t flagcxCommInitRank(flagcxComm_t *comm, int nranks, flagcxUniqueId_t uniqueId, int rank);
FLAGCX_API flagcxResult_t flagcxCommFinalize(flagcxComm_t comm);
FLAGCX_API flagcxResult_t flagcxCommDestroy(flagcxComm_t comm);
FLAGCX_API flagcxResult_t flagcxCommAbort(flagcxComm_t comm);
FLAGCX_API flagcxResult_t flagcxCommResume(flagcxComm_t comm);
FLAGCX_API flagcxResult_t flagcxCommSuspend(flagcxComm_t comm);
FLAGCX_API flagcxResult_t flagcxCommGetAsyncError(flagcxComm_t comm, flagcxResult_t *asyncError);
FLAGCX_API flagcxResult_t flagcxCommCount(const flagcxComm_t comm, int *count);
FLAGCX_API flagcxResult_t flagcxCommGetDeviceNumber(const flagcxComm_t comm, int *device);
FLAGCX_API flagcxResult_t flagcxCommUserRank(const flagcxComm_t comm, int *rank);
FLAGCX_API flagcxResult_t flagcxIsHomoComm(flagcxComm_t comm, int *isHomo);

/* Collectives: called by all ranks. Counts and displacements are elements. The count of AllGather,
 * ReduceScatter, AlltoAll, Gather and Scatter is that of one rank's block. */
FLAGCX_API flagcxResult_t flagcxBarrier(flagcxComm_t comm, flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxReduce(const void *sendbuff, void *recvbuff, size_t count,
                                       flagcxDataType_t datatype, flagcxRedOp_t op, int root, flagcxComm_t comm,
                                       flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxGather(const void *sendbuff, void *recvbuff, size_t count,
                                       flagcxDataType_t datatype, int root, flagcxComm_t comm,
                                       flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxScatter(const void *sendbuff, void *recvbuff, size_t count,
                                        flagcxDataType_t datatype, int root, flagcxComm_t comm,
                                        flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                                          flagcxDataType_t datatype, int root, flagcxComm_t comm,
                                          flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                                          flagcxDataType_t datatype, flagcxRedOp_t op, flagcxComm_t comm,
                                          flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                                              flagcxDataType_t datatype, flagcxRedOp_t op, flagcxComm_t comm,
                                              flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                                          flagcxDataType_t datatype, flagcxComm_t comm, flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxAlltoAll(const void *sendbuff, void *recvbuff, size_t count,
                                         flagcxDataType_t datatype, flagcxComm_t comm, flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxAlltoAllv(const void *sendbuff, size_t *sendcounts, size_t *sdispls,
                                          void *recvbuff, size_t *recvcounts, size_t *rdispls,
                                          flagcxDataType_t datatype, flagcxComm_t comm, flagcxStream_t stream);

/* Point to point: called by the two ranks. */
FLAGCX_API flagcxResult_t flagcxSend(const void *sendbuff, size_t count, flagcxDataType_t datatype, int peer,
                                     flagcxComm_t comm, flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxRecv(void *recvbuff, size_t count, flagcxDataType_t datatype, int peer,
                                     flagcxComm_t comm, flagcxStream_t stream);

/* A group belongs to the calling thread; comm may be NULL. */
FLAGCX_API flagcxResult_t flagcxGroupStart(flagcxComm_t comm);
FLAGCX_API flagcxResult_t flagcxGroupEnd(flagcxComm_t comm);

/* One-sided operations: for communicators over several vendors' devices with RDMA between them.
 * Their signatures changed in nearly every release; a binding leaves them alone. */
#ifndef FLAGCX_API_LEGACY
FLAGCX_API flagcxResult_t flagcxOneSideRegister(flagcxComm_t comm, void *buffer, size_t bytes);
FLAGCX_API flagcxResult_t flagcxOneSideSignalRegister(const flagcxComm_t comm, void *buffer, size_t bytes,
                                                      int pointerType);
FLAGCX_API flagcxResult_t flagcxOneSideStagingRegister(const flagcxComm_t comm, void *buffer, size_t bytes);
FLAGCX_API flagcxResult_t flagcxOneSideStagingDeregister(const flagcxComm_t comm);
FLAGCX_API flagcxResult_t flagcxGet(flagcxComm_t comm, int peer, size_t sourceOffset, size_t destinationOffset,
                                    size_t bytes, int sourceIndex, int destinationIndex);
FLAGCX_API flagcxResult_t flagcxPut(flagcxComm_t comm, int peer, size_t sourceOffset, size_t destinationOffset,
                                    size_t bytes, int sourceIndex, int destinationIndex);
FLAGCX_API flagcxResult_t flagcxBatchPut(flagcxComm_t comm, int peer, const size_t *sourceOffsets,
                                         const size_t *destinationOffsets, const size_t *bytes,
                                         const int *sourceIndexes, const int *destinationIndexes, size_t count);
FLAGCX_API flagcxResult_t flagcxPutSignal(const void *buffer, size_t count, flagcxDataType_t datatype, int peer,
                                          flagcxWindow_t peerWindow, size_t peerOffset, unsigned int flags,
                                          flagcxComm_t comm, flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxSignal(int peer, unsigned int flags, flagcxComm_t comm, flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxWaitSignal(int count, const flagcxWaitSignalDesc_t *signals, flagcxComm_t comm,
                                           flagcxStream_t stream);
FLAGCX_API flagcxResult_t flagcxReadCounter(flagcxComm_t comm, uint64_t *count);
FLAGCX_API flagcxResult_t flagcxWaitCounter(flagcxComm_t comm, uint64_t target);
#endif

#ifdef __cplusplus
}
#endif

#endif
