/* What a communicator can be asked. A handle stays valid for the life of the process; ended, it answers CLOSED. */

int32_t sglang_fl_flagcx_is_open(const sglang_fl_flagcx_communicator *communicator);
int32_t sglang_fl_flagcx_calls_in_flight(const sglang_fl_flagcx_communicator *communicator);
int32_t sglang_fl_flagcx_count(sglang_fl_flagcx_communicator *communicator, int32_t *count);
int32_t sglang_fl_flagcx_rank(sglang_fl_flagcx_communicator *communicator, int32_t *rank);
int32_t sglang_fl_flagcx_device(sglang_fl_flagcx_communicator *communicator, int32_t *device);
int32_t sglang_fl_flagcx_is_homogeneous(sglang_fl_flagcx_communicator *communicator, int32_t *homogeneous);
int32_t sglang_fl_flagcx_async_error(sglang_fl_flagcx_communicator *communicator, int32_t *error);
int32_t sglang_fl_flagcx_last_error(sglang_fl_flagcx_communicator *communicator, char *message,
                                    size_t message_bytes);
/* The library's own handles, for tools that call it directly: flagcxComm_t, and the boxed stream. */
uintptr_t sglang_fl_flagcx_library_communicator(const sglang_fl_flagcx_communicator *communicator);
int32_t sglang_fl_flagcx_library_stream(sglang_fl_flagcx_communicator *communicator, uintptr_t stream,
                                        uintptr_t *boxed);
