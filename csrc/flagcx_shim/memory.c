/* Memory from the library, registered buffers and symmetric windows; pointers that are filled start as NULL,
   because releases up to 0.10 take anything else for memory that is already there. */
#include "internal.h"

/* The head's flagcxMemCCL, the NULL communicator of 0.5 to 0.10, and unread between them. */
enum { DEFAULT_ALLOCATOR = 0 };

int32_t sglang_fl_flagcx_mem_alloc(sglang_fl_flagcx_library *library, size_t bytes, uintptr_t *buffer) {
  void *allocated = NULL;
  int32_t code = library_enter(library);
  if (code != 0) return code;
  code = library->functions.flagcxMemAlloc(&allocated, bytes, DEFAULT_ALLOCATOR);
  if (code == 0 && allocated == NULL) code = SGLANG_FL_FLAGCX_NO_MEMORY_GIVEN;
  *buffer = (uintptr_t)allocated;
  return library_leave(library, code);
}

int32_t sglang_fl_flagcx_mem_free(sglang_fl_flagcx_library *library, uintptr_t buffer) {
  int32_t code = library_enter(library);
  if (code != 0) return code;
  return library_leave(library, library->functions.flagcxMemFree((void *)buffer, DEFAULT_ALLOCATOR));
}

int32_t sglang_fl_flagcx_register(sglang_fl_flagcx_communicator *communicator, uintptr_t buffer, size_t bytes,
                                  uintptr_t *registration) {
  void *handle = NULL;
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxCommRegister(communicator->comm, (void *)buffer, bytes, &handle,
                                                             DEFAULT_ALLOCATOR);
  *registration = (uintptr_t)handle;
  return communicator_leave(communicator, code);
}

int32_t sglang_fl_flagcx_deregister(sglang_fl_flagcx_communicator *communicator, uintptr_t registration) {
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxCommDeregister(communicator->comm, (void *)registration,
                                                               DEFAULT_ALLOCATOR);
  return communicator_leave(communicator, code);
}

int32_t sglang_fl_flagcx_window_register(sglang_fl_flagcx_communicator *communicator, uintptr_t buffer,
                                         size_t bytes, int32_t flags, uintptr_t *window) {
  void *handle = NULL;
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxCommWindowRegister(communicator->comm, (void *)buffer, bytes,
                                                                   &handle, flags, DEFAULT_ALLOCATOR);
  *window = (uintptr_t)handle;
  return communicator_leave(communicator, code);
}

int32_t sglang_fl_flagcx_window_deregister(sglang_fl_flagcx_communicator *communicator, uintptr_t window) {
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxCommWindowDeregister(communicator->comm, (void *)window,
                                                                     DEFAULT_ALLOCATOR);
  return communicator_leave(communicator, code);
}
