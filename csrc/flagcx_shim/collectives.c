/* The collectives: look up the boxed stream, call the library, no short cut for anything. */
#include "internal.h"

int32_t sglang_fl_flagcx_all_reduce_from(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                         uintptr_t receive, size_t count, int32_t dtype, int32_t op,
                                         uintptr_t stream, int32_t place) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_ALL_REDUCE, dtype, count, NO_PEER,
                            stream, place, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxAllReduce((const void *)send, (void *)receive, count, dtype, op,
                                                          communicator->comm, box);
  return call_end(communicator, call, code);
}

int32_t sglang_fl_flagcx_all_reduce(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                    uintptr_t receive, size_t count, int32_t dtype, int32_t op,
                                    uintptr_t stream) {
  return sglang_fl_flagcx_all_reduce_from(communicator, send, receive, count, dtype, op, stream, NO_PLACE);
}

int32_t sglang_fl_flagcx_reduce(sglang_fl_flagcx_communicator *communicator, uintptr_t send, uintptr_t receive,
                                size_t count, int32_t dtype, int32_t op, int32_t root, uintptr_t stream) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_REDUCE, dtype, count, root, stream,
                            NO_PLACE, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxReduce((const void *)send, (void *)receive, count, dtype, op,
                                                       root, communicator->comm, box);
  return call_end(communicator, call, code);
}

int32_t sglang_fl_flagcx_reduce_scatter_from(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                             uintptr_t receive, size_t receive_count, int32_t dtype, int32_t op,
                                             uintptr_t stream, int32_t place) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_REDUCE_SCATTER, dtype, receive_count,
                            NO_PEER, stream, place, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxReduceScatter((const void *)send, (void *)receive, receive_count,
                                                              dtype, op, communicator->comm, box);
  return call_end(communicator, call, code);
}

int32_t sglang_fl_flagcx_reduce_scatter(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                        uintptr_t receive, size_t receive_count, int32_t dtype, int32_t op,
                                        uintptr_t stream) {
  return sglang_fl_flagcx_reduce_scatter_from(communicator, send, receive, receive_count, dtype, op, stream, NO_PLACE);
}

int32_t sglang_fl_flagcx_all_gather_from(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                         uintptr_t receive, size_t send_count, int32_t dtype, uintptr_t stream, int32_t place) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_ALL_GATHER, dtype, send_count, NO_PEER,
                            stream, place, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxAllGather((const void *)send, (void *)receive, send_count, dtype,
                                                          communicator->comm, box);
  return call_end(communicator, call, code);
}

int32_t sglang_fl_flagcx_all_gather(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                    uintptr_t receive, size_t send_count, int32_t dtype, uintptr_t stream) {
  return sglang_fl_flagcx_all_gather_from(communicator, send, receive, send_count, dtype, stream, NO_PLACE);
}

int32_t sglang_fl_flagcx_broadcast(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                   uintptr_t receive, size_t count, int32_t dtype, int32_t root,
                                   uintptr_t stream) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_BROADCAST, dtype, count, root, stream,
                            NO_PLACE, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxBroadcast((const void *)send, (void *)receive, count, dtype,
                                                          root, communicator->comm, box);
  return call_end(communicator, call, code);
}

int32_t sglang_fl_flagcx_gather(sglang_fl_flagcx_communicator *communicator, uintptr_t send, uintptr_t receive,
                                size_t count, int32_t dtype, int32_t root, uintptr_t stream) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_GATHER, dtype, count, root, stream,
                            NO_PLACE, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxGather((const void *)send, (void *)receive, count, dtype, root,
                                                       communicator->comm, box);
  return call_end(communicator, call, code);
}

int32_t sglang_fl_flagcx_scatter(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                 uintptr_t receive, size_t count, int32_t dtype, int32_t root,
                                 uintptr_t stream) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_SCATTER, dtype, count, root, stream,
                            NO_PLACE, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxScatter((const void *)send, (void *)receive, count, dtype, root,
                                                        communicator->comm, box);
  return call_end(communicator, call, code);
}

int32_t sglang_fl_flagcx_all_to_all(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                    uintptr_t receive, size_t count, int32_t dtype, uintptr_t stream) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_ALL_TO_ALL, dtype, count, NO_PEER,
                            stream, NO_PLACE, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxAlltoAll((const void *)send, (void *)receive, count, dtype,
                                                         communicator->comm, box);
  return call_end(communicator, call, code);
}

int32_t sglang_fl_flagcx_all_to_all_v(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                      const size_t *send_counts, const size_t *send_offsets, uintptr_t receive,
                                      const size_t *receive_counts, const size_t *receive_offsets,
                                      int32_t dtype, uintptr_t stream) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_ALL_TO_ALL_V, dtype, 0, NO_PEER, stream,
                            NO_PLACE, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxAlltoAllv((const void *)send, send_counts, send_offsets,
                                                          (void *)receive, receive_counts, receive_offsets,
                                                          dtype, communicator->comm, box);
  return call_end(communicator, call, code);
}

int32_t sglang_fl_flagcx_barrier(sglang_fl_flagcx_communicator *communicator, uintptr_t stream) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_BARRIER, NO_DTYPE, 0, NO_PEER, stream,
                            NO_PLACE, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxBarrier(communicator->comm, box);
  return call_end(communicator, call, code);
}
