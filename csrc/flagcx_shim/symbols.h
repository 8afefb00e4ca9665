/* Every function of libflagcx that the shim may call, in one table: result, name, parameters, needed or not.

   Parameters that changed between releases are declared so that one call fits all of them:
   unique ids are void * (a pointer to the id since 0.13, a pointer to a pointer before), and registration and
   allocation carry one trailing integer, which the head reads as the allocator, 0.5 to 0.10 as a NULL
   communicator, and the releases between them ignore. */
#ifndef SGLANG_FL_FLAGCX_SYMBOLS_H
#define SGLANG_FL_FLAGCX_SYMBOLS_H

#define SGLANG_FL_FLAGCX_SYMBOLS(SYMBOL)                                                                         \
  SYMBOL(int, flagcxDeviceHandleInit, (void ***handle), OPTIONAL)                                                \
  SYMBOL(int, flagcxDeviceHandleFree, (void **handle), OPTIONAL)                                                 \
  SYMBOL(int, flagcxHandleInit, (struct handler_group * *group), OPTIONAL)                                       \
  SYMBOL(int, flagcxHandleFree, (struct handler_group * group), OPTIONAL)                                        \
  SYMBOL(int, flagcxGetUniqueId, (void *unique_id), NEEDED)                                                      \
  SYMBOL(int, flagcxCommInitRank, (void **comm, int world_size, void *unique_id, int rank), NEEDED)              \
  SYMBOL(int, flagcxCommDestroy, (void *comm), NEEDED)                                                           \
  SYMBOL(int, flagcxCommAbort, (void *comm), OPTIONAL)                                                           \
  SYMBOL(int, flagcxCommGetAsyncError, (void *comm, int *error), OPTIONAL)                                       \
  SYMBOL(int, flagcxCommCount, (void *comm, int *count), OPTIONAL)                                               \
  SYMBOL(int, flagcxCommUserRank, (void *comm, int *rank), OPTIONAL)                                             \
  SYMBOL(int, flagcxCommGetDeviceNumber, (void *comm, int *device), OPTIONAL)                                    \
  SYMBOL(int, flagcxIsHomoComm, (void *comm, int *homogeneous), OPTIONAL)                                        \
  SYMBOL(const char *, flagcxGetLastError, (void *comm), OPTIONAL)                                               \
  SYMBOL(int, flagcxAllReduce,                                                                                   \
         (const void *send, void *receive, size_t count, int dtype, int op, void *comm, void *stream), OPTIONAL) \
  SYMBOL(int, flagcxReduce,                                                                                      \
         (const void *send, void *receive, size_t count, int dtype, int op, int root, void *comm, void *stream), \
         OPTIONAL)                                                                                               \
  SYMBOL(int, flagcxReduceScatter,                                                                               \
         (const void *send, void *receive, size_t count, int dtype, int op, void *comm, void *stream), OPTIONAL) \
  SYMBOL(int, flagcxAllGather,                                                                                   \
         (const void *send, void *receive, size_t count, int dtype, void *comm, void *stream), OPTIONAL)         \
  SYMBOL(int, flagcxBroadcast,                                                                                   \
         (const void *send, void *receive, size_t count, int dtype, int root, void *comm, void *stream),         \
         OPTIONAL)                                                                                               \
  SYMBOL(int, flagcxGather,                                                                                      \
         (const void *send, void *receive, size_t count, int dtype, int root, void *comm, void *stream),         \
         OPTIONAL)                                                                                               \
  SYMBOL(int, flagcxScatter,                                                                                     \
         (const void *send, void *receive, size_t count, int dtype, int root, void *comm, void *stream),         \
         OPTIONAL)                                                                                               \
  SYMBOL(int, flagcxAlltoAll,                                                                                    \
         (const void *send, void *receive, size_t count, int dtype, void *comm, void *stream), OPTIONAL)         \
  SYMBOL(int, flagcxAlltoAllv,                                                                                   \
         (const void *send, const size_t *send_counts, const size_t *send_offsets, void *receive,                \
          const size_t *receive_counts, const size_t *receive_offsets, int dtype, void *comm, void *stream),     \
         OPTIONAL)                                                                                               \
  SYMBOL(int, flagcxBarrier, (void *comm, void *stream), OPTIONAL)                                               \
  SYMBOL(int, flagcxSend,                                                                                        \
         (const void *buffer, size_t count, int dtype, int peer, void *comm, void *stream), OPTIONAL)            \
  SYMBOL(int, flagcxRecv, (void *buffer, size_t count, int dtype, int peer, void *comm, void *stream), OPTIONAL) \
  SYMBOL(int, flagcxGroupStart, (void *comm), OPTIONAL)                                                          \
  SYMBOL(int, flagcxGroupEnd, (void *comm), OPTIONAL)                                                            \
  SYMBOL(int, flagcxMemAlloc, (void **buffer, size_t bytes, intptr_t allocator), OPTIONAL)                       \
  SYMBOL(int, flagcxMemFree, (void *buffer, intptr_t allocator), OPTIONAL)                                       \
  SYMBOL(int, flagcxCommRegister,                                                                                \
         (void *comm, void *buffer, size_t bytes, void **registration, intptr_t allocator), OPTIONAL)            \
  SYMBOL(int, flagcxCommDeregister, (void *comm, void *registration, intptr_t allocator), OPTIONAL)              \
  SYMBOL(int, flagcxCommWindowRegister,                                                                          \
         (void *comm, void *buffer, size_t bytes, void **window, int flags, intptr_t allocator), OPTIONAL)       \
  SYMBOL(int, flagcxCommWindowDeregister, (void *comm, void *window, intptr_t allocator), OPTIONAL)

/* Indexes into the device handle's function table; 0 to 16 are the same in every release from 0.5 on. */
enum device_function {
  DEVICE_SYNCHRONIZE = 0,
  DEVICE_SET = 5,
  DEVICE_GET = 6,
  DEVICE_COUNT = 7,
  DEVICE_VENDOR = 8,
  STREAM_COPY = 12,
  STREAM_FREE = 13,
  STREAM_SYNCHRONIZE = 14,
};

/* What flagcxHandleInit fills: the form of 0.12 and earlier, kept by later releases as deprecated. */
struct handler_group {
  void *unique_id;
  void *comm;
  void **device_functions;
};

#endif
