/* What the parts of the shim share: the library, its table of functions, communicators and their streams. */
#ifndef SGLANG_FL_FLAGCX_INTERNAL_H
#define SGLANG_FL_FLAGCX_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "calls.h"
#include "flagcx_shim.h"
#include "gate.h"
#include "symbols.h"

#define DECLARE_FUNCTION(result, name, parameters, need) result(*name) parameters;
#define DECLARE_PRESENCE(result, name, parameters, need) bool name;

struct sglang_fl_flagcx_library {
  struct {
    SGLANG_FL_FLAGCX_SYMBOLS(DECLARE_FUNCTION)
  } functions; /* an absent one points at a function that answers MISSING_SYMBOL: no test on the call path */
  struct {
    SGLANG_FL_FLAGCX_SYMBOLS(DECLARE_PRESENCE)
  } present;
  void *loaded; /* of dlopen; never closed, since the library keeps threads of its own */
  char *path;
  struct handler_group *group; /* NULL in the new form */
  void **device_functions;
  struct gate gate; /* inside: calls, open groups, communicators and jobs that use this library */
  atomic_int open_groups;
  struct sglang_fl_flagcx_library *kept; /* the one opened before */
};

/* A raw stream and its boxed form; never changed after it is published, freed when the communicator ends. */
struct boxed_stream {
  uintptr_t raw;
  void *box;
  struct boxed_stream *next;
};

enum { STREAM_BUCKETS = 64 };

struct stream_table {
  _Atomic(struct boxed_stream *) last; /* most calls use the stream of the call before */
  _Atomic(struct boxed_stream *) buckets[STREAM_BUCKETS];
  pthread_mutex_t adding;
};

/* DRAINING can still become LIVE again; GIVEN_UP is ENDING whose waiter has left. */
enum fate { LIVE, DRAINING, ENDING, GIVEN_UP, ENDED };

/* Never freed, under 1 KiB each: whoever still holds a handle, in whatever order Python's collector takes a
   cycle apart, gets CLOSED and not freed memory. The same holds for libraries. */
struct sglang_fl_flagcx_communicator {
  struct gate gate; /* inside: calls in flight and open groups */
  void *comm;       /* flagcxComm_t */
  sglang_fl_flagcx_library *library;
  _Atomic(struct call_ring *) calls; /* NULL while nothing is recorded; freed after the end, by its reader */
  struct stream_table streams;
  int32_t creation_device; /* the device it was created on, or -1 if nobody named one */
  atomic_int open_groups;
  atomic_int fate; /* enum fate */
  atomic_bool abort_tried;
  atomic_bool refused; /* the gate stays shut */
  struct sglang_fl_flagcx_communicator *kept; /* the one created before */
};

/* device.c */
int32_t library_set_device(sglang_fl_flagcx_library *library, int32_t device);

/* streams.c */
void streams_init(struct stream_table *streams);
int32_t streams_box(sglang_fl_flagcx_communicator *communicator, uintptr_t raw, void **box);
void streams_free(sglang_fl_flagcx_communicator *communicator);

/* communicator.c */
sglang_fl_flagcx_communicator *communicator_new(sglang_fl_flagcx_library *library, void *comm, int32_t device);

/* groups are counted so that an end without a start cannot leave a gate that was never entered */
static inline bool group_counted_out(atomic_int *open_groups) {
  int open = atomic_load(open_groups);
  while (open > 0 && !atomic_compare_exchange_weak(open_groups, &open, open - 1)) continue;
  return open > 0;
}

static inline int32_t communicator_enter(sglang_fl_flagcx_communicator *communicator) {
  if (communicator == NULL) return SGLANG_FL_FLAGCX_NULL_HANDLE;
  return gate_enter(&communicator->gate) ? 0 : SGLANG_FL_FLAGCX_CLOSED;
}

static inline int32_t communicator_leave(sglang_fl_flagcx_communicator *communicator, int32_t code) {
  gate_leave(&communicator->gate);
  return code;
}

/* Enter and find the boxed form of the raw stream. */
static inline int32_t communicator_enter_on(sglang_fl_flagcx_communicator *communicator, uintptr_t raw,
                                            void **box) {
  int32_t code = communicator_enter(communicator);
  if (code != 0) return code;
  const struct boxed_stream *last = atomic_load_explicit(&communicator->streams.last, memory_order_acquire);
  if (last != NULL && last->raw == raw) {
    *box = last->box;
    return 0;
  }
  code = streams_box(communicator, raw, box);
  return code == 0 ? 0 : communicator_leave(communicator, code);
}

static inline struct call call_record(sglang_fl_flagcx_communicator *communicator,
                                      enum sglang_fl_flagcx_operation operation, int32_t dtype, uint64_t count,
                                      int32_t peer, uintptr_t stream, int32_t place) {
  struct call_ring *ring = atomic_load_explicit(&communicator->calls, memory_order_acquire);
  if (ring == NULL) return (struct call){NULL, 0};
  return ring_enter(ring, operation, dtype, count, peer, stream, place);
}

/* A call of the library: enter, find the box, and record that it begins; what is not 0 is the call's result. */
static inline int32_t call_begin(sglang_fl_flagcx_communicator *communicator,
                                 enum sglang_fl_flagcx_operation operation, int32_t dtype, uint64_t count,
                                 int32_t peer, uintptr_t stream, int32_t place, void **box, struct call *call) {
  const int32_t code = communicator_enter_on(communicator, stream, box);
  if (code != 0) return code;
  *call = call_record(communicator, operation, dtype, count, peer, stream, place);
  return 0;
}

static inline int32_t call_end(sglang_fl_flagcx_communicator *communicator, struct call call, int32_t code) {
  if (call.recorded != NULL)
    code = ring_leave(atomic_load_explicit(&communicator->calls, memory_order_relaxed), call, code);
  /* What is called inside a group only starts at its end: an event behind it would say nothing. */
  if (code == SGLANG_FL_FLAGCX_MARK_DUE && atomic_load(&communicator->open_groups) > 0) code = 0;
  return communicator_leave(communicator, code);
}

static inline int32_t library_enter(sglang_fl_flagcx_library *library) {
  if (library == NULL) return SGLANG_FL_FLAGCX_NULL_HANDLE;
  return gate_enter(&library->gate) ? 0 : SGLANG_FL_FLAGCX_CLOSED;
}

static inline int32_t library_leave(sglang_fl_flagcx_library *library, int32_t code) {
  gate_leave(&library->gate);
  return code;
}

#endif
