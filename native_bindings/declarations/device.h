/* Devices and streams, for the calling thread. */

int32_t sglang_fl_flagcx_vendor(sglang_fl_flagcx_library *library, char *name, size_t name_bytes);
int32_t sglang_fl_flagcx_set_device(sglang_fl_flagcx_library *library, int32_t device);
int32_t sglang_fl_flagcx_get_device(sglang_fl_flagcx_library *library, int32_t *device);
int32_t sglang_fl_flagcx_device_count(sglang_fl_flagcx_library *library, int32_t *count);
int32_t sglang_fl_flagcx_device_synchronize(sglang_fl_flagcx_library *library);
int32_t sglang_fl_flagcx_stream_synchronize(sglang_fl_flagcx_library *library, uintptr_t stream);
