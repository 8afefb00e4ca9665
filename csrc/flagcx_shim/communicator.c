/* A communicator's memory, and what it can be asked. */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

static _Atomic(sglang_fl_flagcx_communicator *) last_created; /* keeps them reachable for leak checkers */

/* Takes one place inside the library's gate, which is given back when the communicator has ended. One that is
   never ended keeps it: ending it unasked would be a collective act at a moment that nobody chose. */
sglang_fl_flagcx_communicator *communicator_new(sglang_fl_flagcx_library *library, void *comm, int32_t device) {
  sglang_fl_flagcx_communicator *communicator = calloc(1, sizeof *communicator);
  if (communicator == NULL) return NULL;
  communicator->comm = comm;
  communicator->library = library;
  communicator->creation_device = device;
  streams_init(&communicator->streams);
  communicator->kept = atomic_load(&last_created);
  while (!atomic_compare_exchange_weak(&last_created, &communicator->kept, communicator)) continue;
  return communicator;
}

int32_t sglang_fl_flagcx_is_open(const sglang_fl_flagcx_communicator *communicator) {
  return communicator != NULL && !atomic_load(&communicator->gate.shut);
}

int32_t sglang_fl_flagcx_calls_in_flight(const sglang_fl_flagcx_communicator *communicator) {
  return communicator != NULL ? atomic_load(&communicator->gate.inside) : 0;
}

static int32_t ask_int(sglang_fl_flagcx_communicator *communicator, int (*question)(void *, int *),
                       int32_t *value) {
  int answer = -1;
  int32_t code = question(communicator->comm, &answer);
  *value = answer;
  return communicator_leave(communicator, code);
}

int32_t sglang_fl_flagcx_count(sglang_fl_flagcx_communicator *communicator, int32_t *count) {
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  return ask_int(communicator, communicator->library->functions.flagcxCommCount, count);
}

int32_t sglang_fl_flagcx_rank(sglang_fl_flagcx_communicator *communicator, int32_t *rank) {
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  return ask_int(communicator, communicator->library->functions.flagcxCommUserRank, rank);
}

int32_t sglang_fl_flagcx_device(sglang_fl_flagcx_communicator *communicator, int32_t *device) {
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  return ask_int(communicator, communicator->library->functions.flagcxCommGetDeviceNumber, device);
}

int32_t sglang_fl_flagcx_is_homogeneous(sglang_fl_flagcx_communicator *communicator, int32_t *homogeneous) {
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  return ask_int(communicator, communicator->library->functions.flagcxIsHomoComm, homogeneous);
}

int32_t sglang_fl_flagcx_async_error(sglang_fl_flagcx_communicator *communicator, int32_t *error) {
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  return ask_int(communicator, communicator->library->functions.flagcxCommGetAsyncError, error);
}

int32_t sglang_fl_flagcx_last_error(sglang_fl_flagcx_communicator *communicator, char *message,
                                    size_t message_bytes) {
  if (message_bytes > 0) message[0] = '\0';
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  if (!communicator->library->present.flagcxGetLastError)
    return communicator_leave(communicator, SGLANG_FL_FLAGCX_MISSING_SYMBOL);
  const char *text = communicator->library->functions.flagcxGetLastError(communicator->comm);
  if (text != NULL && message_bytes > 0) snprintf(message, message_bytes, "%s", text);
  return communicator_leave(communicator, 0);
}

uintptr_t sglang_fl_flagcx_library_communicator(const sglang_fl_flagcx_communicator *communicator) {
  return sglang_fl_flagcx_is_open(communicator) ? (uintptr_t)communicator->comm : 0;
}

int32_t sglang_fl_flagcx_library_stream(sglang_fl_flagcx_communicator *communicator, uintptr_t stream,
                                        uintptr_t *boxed) {
  void *box = NULL;
  int32_t code = communicator_enter_on(communicator, stream, &box);
  if (code != 0) return code;
  *boxed = (uintptr_t)box;
  return communicator_leave(communicator, 0);
}
