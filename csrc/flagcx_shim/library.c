/* Opening libflagcx at run time: which symbols it has, its device functions in either form, closing. */
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#ifndef SGLANG_FL_PACKAGE_VERSION
#error "the build defines SGLANG_FL_PACKAGE_VERSION"
#endif

enum need { OPTIONAL, NEEDED };

struct symbol {
  const char *name;
  enum need need;
  size_t function; /* offsets into the library */
  size_t present;
};

#define DESCRIBE(result, name, parameters, need)                         \
  {#name, need, offsetof(struct sglang_fl_flagcx_library, functions.name), \
   offsetof(struct sglang_fl_flagcx_library, present.name)},

static const struct symbol symbols[] = {SGLANG_FL_FLAGCX_SYMBOLS(DESCRIBE)};
static const size_t symbol_count = sizeof symbols / sizeof symbols[0];

static _Atomic(sglang_fl_flagcx_library *) last_opened; /* keeps them reachable for leak checkers */

static int missing_symbol(void) {
  return SGLANG_FL_FLAGCX_MISSING_SYMBOL;
}

const char *sglang_fl_flagcx_package_version(void) {
  return SGLANG_FL_PACKAGE_VERSION;
}

size_t sglang_fl_flagcx_symbol_count(void) {
  return symbol_count;
}

const char *sglang_fl_flagcx_symbol_name(size_t index) {
  return index < symbol_count ? symbols[index].name : NULL;
}

int32_t sglang_fl_flagcx_has_symbol(const sglang_fl_flagcx_library *library, const char *name) {
  if (library == NULL || name == NULL) return 0;
  for (size_t i = 0; i < symbol_count; i++) {
    if (strcmp(symbols[i].name, name) == 0) return *((const bool *)((const char *)library + symbols[i].present));
  }
  return 0;
}

static void resolve(sglang_fl_flagcx_library *library) {
  for (size_t i = 0; i < symbol_count; i++) {
    void *address = dlsym(library->loaded, symbols[i].name);
    *(bool *)((char *)library + symbols[i].present) = address != NULL;
    *(void **)((char *)library + symbols[i].function) = address != NULL ? address : (void *)missing_symbol;
  }
}

/* Names what is lacking; false if nothing is. */
static bool lacks(const sglang_fl_flagcx_library *library, char *message, size_t message_bytes) {
  size_t used = 0;
  for (size_t i = 0; i < symbol_count; i++) {
    bool present = *((const bool *)((const char *)library + symbols[i].present));
    if (symbols[i].need != NEEDED || present) continue;
    if (used < message_bytes)
      used += (size_t)snprintf(message + used, message_bytes - used, "%s%s", used > 0 ? ", " : "", symbols[i].name);
  }
  bool new_form = library->present.flagcxDeviceHandleInit && library->present.flagcxDeviceHandleFree;
  bool old_form = library->present.flagcxHandleInit && library->present.flagcxHandleFree;
  if (!new_form && !old_form && used < message_bytes)
    used += (size_t)snprintf(message + used, message_bytes - used,
                             "%sflagcxDeviceHandleInit and flagcxDeviceHandleFree (or the older flagcxHandleInit "
                             "and flagcxHandleFree)",
                             used > 0 ? ", " : "");
  return used > 0;
}

static int32_t take_device_functions(sglang_fl_flagcx_library *library) {
  int32_t code;
  if (library->present.flagcxDeviceHandleInit) {
    code = library->functions.flagcxDeviceHandleInit(&library->device_functions);
  } else {
    code = library->functions.flagcxHandleInit(&library->group);
    if (code == 0 && library->group != NULL) library->device_functions = library->group->device_functions;
  }
  if (code == 0 && library->device_functions == NULL) code = SGLANG_FL_FLAGCX_NO_MEMORY_GIVEN;
  return code;
}

static void give_back_device_functions(sglang_fl_flagcx_library *library) {
  if (library->present.flagcxDeviceHandleInit) {
    library->functions.flagcxDeviceHandleFree(library->device_functions);
  } else {
    library->functions.flagcxHandleFree(library->group);
  }
  library->device_functions = NULL;
  library->group = NULL;
}

static char *path_of(void *loaded, const char *asked) {
  struct link_map *map = NULL;
  if (dlinfo(loaded, RTLD_DI_LINKMAP, &map) == 0 && map != NULL && map->l_name[0] != '\0')
    return strdup(map->l_name);
  return strdup(asked);
}

static void say(char *message, size_t message_bytes, const char *text) {
  if (message_bytes > 0) snprintf(message, message_bytes, "%s", text != NULL ? text : "");
}

static int32_t open_into(sglang_fl_flagcx_library *library, const char *path, char *message,
                         size_t message_bytes) {
  library->loaded = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library->loaded == NULL) {
    say(message, message_bytes, dlerror());
    return SGLANG_FL_FLAGCX_NOT_LOADED;
  }
  resolve(library);
  if (lacks(library, message, message_bytes)) {
    dlclose(library->loaded);
    return SGLANG_FL_FLAGCX_MISSING_SYMBOL;
  }
  library->path = path_of(library->loaded, path);
  if (library->path == NULL) return SGLANG_FL_FLAGCX_OUT_OF_MEMORY;
  return take_device_functions(library);
}

sglang_fl_flagcx_library *sglang_fl_flagcx_open(const char *path, int32_t *code, char *message,
                                                size_t message_bytes) {
  say(message, message_bytes, "");
  sglang_fl_flagcx_library *library = calloc(1, sizeof *library);
  *code = library != NULL ? open_into(library, path, message, message_bytes) : SGLANG_FL_FLAGCX_OUT_OF_MEMORY;
  if (*code == 0) {
    library->kept = atomic_load(&last_opened);
    while (!atomic_compare_exchange_weak(&last_opened, &library->kept, library)) continue;
    return library;
  }
  if (library != NULL) free(library->path);
  free(library);
  return NULL;
}

/* Ends nothing while a communicator or a job lives. The mapping stays: the library has threads of its own. */
int32_t sglang_fl_flagcx_close(sglang_fl_flagcx_library *library) {
  if (library == NULL) return SGLANG_FL_FLAGCX_NULL_HANDLE;
  if (atomic_exchange(&library->gate.shut, true)) return SGLANG_FL_FLAGCX_ALREADY_ENDED;
  if (!gate_shut(&library->gate, 0.0)) {
    gate_reopen(&library->gate);
    return SGLANG_FL_FLAGCX_IN_USE;
  }
  give_back_device_functions(library);
  return 0;
}

const char *sglang_fl_flagcx_library_path(const sglang_fl_flagcx_library *library) {
  return library != NULL ? library->path : NULL;
}

int32_t sglang_fl_flagcx_library_users(const sglang_fl_flagcx_library *library) {
  return library != NULL ? atomic_load(&library->gate.inside) : 0;
}

int32_t sglang_fl_flagcx_uses_device_handle_init(const sglang_fl_flagcx_library *library) {
  return library != NULL && library->present.flagcxDeviceHandleInit;
}
