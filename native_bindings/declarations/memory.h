/* Memory that the library can move faster: its own, registered buffers, symmetric windows. */

int32_t sglang_fl_flagcx_mem_alloc(sglang_fl_flagcx_library *library, size_t bytes, uintptr_t *buffer);
int32_t sglang_fl_flagcx_mem_free(sglang_fl_flagcx_library *library, uintptr_t buffer);
int32_t sglang_fl_flagcx_register(sglang_fl_flagcx_communicator *communicator, uintptr_t buffer, size_t bytes,
                                  uintptr_t *registration);
int32_t sglang_fl_flagcx_deregister(sglang_fl_flagcx_communicator *communicator, uintptr_t registration);
int32_t sglang_fl_flagcx_window_register(sglang_fl_flagcx_communicator *communicator, uintptr_t buffer,
                                         size_t bytes, int32_t flags, uintptr_t *window);
int32_t sglang_fl_flagcx_window_deregister(sglang_fl_flagcx_communicator *communicator, uintptr_t window);
