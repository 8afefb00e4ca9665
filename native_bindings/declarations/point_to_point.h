/* Send, receive and groups. An open group counts as a call in flight. */

int32_t sglang_fl_flagcx_send(sglang_fl_flagcx_communicator *communicator, uintptr_t buffer, size_t count,
                              int32_t dtype, int32_t peer, uintptr_t stream);
int32_t sglang_fl_flagcx_recv(sglang_fl_flagcx_communicator *communicator, uintptr_t buffer, size_t count,
                              int32_t dtype, int32_t peer, uintptr_t stream);
int32_t sglang_fl_flagcx_group_start(sglang_fl_flagcx_communicator *communicator);
int32_t sglang_fl_flagcx_group_end(sglang_fl_flagcx_communicator *communicator);
/* The same with a NULL communicator: homogeneous communicators of this thread. */
int32_t sglang_fl_flagcx_library_group_start(sglang_fl_flagcx_library *library);
int32_t sglang_fl_flagcx_library_group_end(sglang_fl_flagcx_library *library);
