/* Send, receive, and the groups that let several calls progress together. */
#include "internal.h"

int32_t sglang_fl_flagcx_send(sglang_fl_flagcx_communicator *communicator, uintptr_t buffer, size_t count,
                              int32_t dtype, int32_t peer, uintptr_t stream) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_SEND, dtype, count, peer, stream, NO_PLACE, &box, &call);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxSend((const void *)buffer, count, dtype, peer,
                                                     communicator->comm, box);
  return call_end(communicator, call, code);
}

int32_t sglang_fl_flagcx_recv(sglang_fl_flagcx_communicator *communicator, uintptr_t buffer, size_t count,
                              int32_t dtype, int32_t peer, uintptr_t stream) {
  void *box;
  struct call call;
  int32_t code = call_begin(communicator, SGLANG_FL_FLAGCX_RECV, dtype, count, peer, stream, NO_PLACE, &box, &call);
  if (code != 0) return code;
  code =
      communicator->library->functions.flagcxRecv((void *)buffer, count, dtype, peer, communicator->comm, box);
  return call_end(communicator, call, code);
}

/* An open group stays inside the gate: nothing is ended between its start and its end. */
int32_t sglang_fl_flagcx_group_start(sglang_fl_flagcx_communicator *communicator) {
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  code = communicator->library->functions.flagcxGroupStart(communicator->comm);
  if (code != 0) return communicator_leave(communicator, code);
  atomic_fetch_add(&communicator->open_groups, 1);
  return 0;
}

/* Also behind a shut gate: the group must end so that the communicator can. */
int32_t sglang_fl_flagcx_group_end(sglang_fl_flagcx_communicator *communicator) {
  if (communicator == NULL) return SGLANG_FL_FLAGCX_NULL_HANDLE;
  if (!group_counted_out(&communicator->open_groups)) {
    int32_t code = communicator_enter(communicator);
    if (code != 0) return code;
  }
  const struct call call =
      call_record(communicator, SGLANG_FL_FLAGCX_GROUP_END, NO_DTYPE, 0, NO_PEER, 0, NO_PLACE);
  return call_end(communicator, call, communicator->library->functions.flagcxGroupEnd(communicator->comm));
}

int32_t sglang_fl_flagcx_library_group_start(sglang_fl_flagcx_library *library) {
  int32_t code = library_enter(library);
  if (code != 0) return code;
  code = library->functions.flagcxGroupStart(NULL);
  if (code != 0) return library_leave(library, code);
  atomic_fetch_add(&library->open_groups, 1);
  return 0;
}

int32_t sglang_fl_flagcx_library_group_end(sglang_fl_flagcx_library *library) {
  if (library == NULL) return SGLANG_FL_FLAGCX_NULL_HANDLE;
  if (!group_counted_out(&library->open_groups)) {
    int32_t code = library_enter(library);
    if (code != 0) return code;
  }
  return library_leave(library, library->functions.flagcxGroupEnd(NULL));
}
