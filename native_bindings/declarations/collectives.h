/* The collectives: buffers are addresses, counts are elements, stream is the raw stream of the device. */

int32_t sglang_fl_flagcx_all_reduce(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                    uintptr_t receive, size_t count, int32_t dtype, int32_t op,
                                    uintptr_t stream);
int32_t sglang_fl_flagcx_reduce(sglang_fl_flagcx_communicator *communicator, uintptr_t send, uintptr_t receive,
                                size_t count, int32_t dtype, int32_t op, int32_t root, uintptr_t stream);
int32_t sglang_fl_flagcx_reduce_scatter(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                        uintptr_t receive, size_t receive_count, int32_t dtype, int32_t op,
                                        uintptr_t stream);
int32_t sglang_fl_flagcx_all_gather(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                    uintptr_t receive, size_t send_count, int32_t dtype, uintptr_t stream);
int32_t sglang_fl_flagcx_broadcast(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                   uintptr_t receive, size_t count, int32_t dtype, int32_t root,
                                   uintptr_t stream);
int32_t sglang_fl_flagcx_gather(sglang_fl_flagcx_communicator *communicator, uintptr_t send, uintptr_t receive,
                                size_t count, int32_t dtype, int32_t root, uintptr_t stream);
int32_t sglang_fl_flagcx_scatter(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                 uintptr_t receive, size_t count, int32_t dtype, int32_t root,
                                 uintptr_t stream);
int32_t sglang_fl_flagcx_all_to_all(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                    uintptr_t receive, size_t count, int32_t dtype, uintptr_t stream);
int32_t sglang_fl_flagcx_all_to_all_v(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                      const size_t *send_counts, const size_t *send_offsets, uintptr_t receive,
                                      const size_t *receive_counts, const size_t *receive_offsets,
                                      int32_t dtype, uintptr_t stream);
int32_t sglang_fl_flagcx_barrier(sglang_fl_flagcx_communicator *communicator, uintptr_t stream);
