/* Opening libflagcx, asking what it has, closing it. */

/* The version of the Python package that this extension was built for. */
const char *sglang_fl_flagcx_package_version(void);

/* Library. open: NULL on failure, with *code and the loader's or the shim's words in message. */
sglang_fl_flagcx_library *sglang_fl_flagcx_open(const char *path, int32_t *code, char *message,
                                                size_t message_bytes);
int32_t sglang_fl_flagcx_close(sglang_fl_flagcx_library *library);
const char *sglang_fl_flagcx_library_path(const sglang_fl_flagcx_library *library);
int32_t sglang_fl_flagcx_library_users(const sglang_fl_flagcx_library *library);
int32_t sglang_fl_flagcx_uses_device_handle_init(const sglang_fl_flagcx_library *library);
size_t sglang_fl_flagcx_symbol_count(void);
const char *sglang_fl_flagcx_symbol_name(size_t index);
int32_t sglang_fl_flagcx_has_symbol(const sglang_fl_flagcx_library *library, const char *name);
