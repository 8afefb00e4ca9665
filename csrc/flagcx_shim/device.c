/* The few device and stream functions of FlagCX's handle that a binding needs. */
#include <stdio.h>
#include <string.h>

#include "internal.h"

typedef int (*no_argument)(void);
typedef int (*takes_int)(int);
typedef int (*fills_int)(int *);
typedef int (*fills_text)(char *);
typedef int (*takes_stream)(void *);
typedef int (*copies_stream)(void **, void *);

int32_t sglang_fl_flagcx_vendor(sglang_fl_flagcx_library *library, char *name, size_t name_bytes) {
  char vendor[1024] = ""; /* the library writes up to 128 bytes without asking */
  int32_t code = library_enter(library);
  if (code != 0) return code;
  code = ((fills_text)library->device_functions[DEVICE_VENDOR])(vendor);
  vendor[sizeof vendor - 1] = '\0';
  if (code == 0 && name_bytes > 0) snprintf(name, name_bytes, "%s", vendor);
  return library_leave(library, code);
}

int32_t library_set_device(sglang_fl_flagcx_library *library, int32_t device) {
  return ((takes_int)library->device_functions[DEVICE_SET])(device);
}

int32_t sglang_fl_flagcx_set_device(sglang_fl_flagcx_library *library, int32_t device) {
  int32_t code = library_enter(library);
  if (code != 0) return code;
  return library_leave(library, library_set_device(library, device));
}

static int32_t ask_int(sglang_fl_flagcx_library *library, enum device_function which, int32_t *value) {
  int answer = -1;
  int32_t code = library_enter(library);
  if (code != 0) return code;
  code = ((fills_int)library->device_functions[which])(&answer);
  *value = answer;
  return library_leave(library, code);
}

int32_t sglang_fl_flagcx_get_device(sglang_fl_flagcx_library *library, int32_t *device) {
  return ask_int(library, DEVICE_GET, device);
}

int32_t sglang_fl_flagcx_device_count(sglang_fl_flagcx_library *library, int32_t *count) {
  return ask_int(library, DEVICE_COUNT, count);
}

int32_t sglang_fl_flagcx_device_synchronize(sglang_fl_flagcx_library *library) {
  int32_t code = library_enter(library);
  if (code != 0) return code;
  return library_leave(library, ((no_argument)library->device_functions[DEVICE_SYNCHRONIZE])());
}

int32_t sglang_fl_flagcx_stream_synchronize(sglang_fl_flagcx_library *library, uintptr_t stream) {
  void *box = NULL;
  int32_t code = library_enter(library);
  if (code != 0) return code;
  code = ((copies_stream)library->device_functions[STREAM_COPY])(&box, (void *)stream);
  if (code == 0) {
    code = ((takes_stream)library->device_functions[STREAM_SYNCHRONIZE])(box);
    ((takes_stream)library->device_functions[STREAM_FREE])(box);
  }
  return library_leave(library, code);
}
