/* The ring of a communicator's last calls. The call path writes, other threads read, nobody waits.

   An entry is a sequence lock whose sequence is the call's number: 0 while the entry is being taken for another
   call. All fields are atomic: what a writer stores is released after the 0, and what a reader loads is acquired
   before it looks at the number again, so that a reader that saw anything of the next call also sees its number. */
#ifndef SGLANG_FL_FLAGCX_CALLS_H
#define SGLANG_FL_FLAGCX_CALLS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "flagcx_shim.h"
#include "ticks.h"

#ifndef RING_PAUSE /* a test lets readers in while an entry is half written */
#define RING_PAUSE() ((void)0)
#endif

struct recorded_call {
  _Alignas(64) _Atomic uint64_t number; /* one cache line each */
  _Atomic uint64_t count;
  _Atomic uint64_t stream;
  _Atomic uint64_t ticks_in;
  _Atomic uint64_t ticks_out; /* 0 while it is under way */
  _Atomic int32_t operation;
  _Atomic int32_t dtype;
  _Atomic int32_t peer;
  _Atomic int32_t captured;
  _Atomic int32_t place;
  _Atomic int32_t result;
};

struct call_ring {
  _Atomic uint64_t entered; /* number of the last call; the first one is 1 */
  atomic_bool mark_due;
  atomic_bool has_captured;
  _Atomic int32_t next_place;
  struct clock_reading made; /* when the ring was made */
  int (*is_capturing)(void *stream, int *status);
  size_t size; /* a power of two */
  struct recorded_call calls[];
};

/* What the call path carries from the beginning of a call to its end. */
struct call {
  struct recorded_call *recorded; /* NULL where nothing is recorded */
  uint64_t number;
};

enum { NO_DTYPE = -1, NO_PEER = -1, NO_PLACE = 0 };

static inline bool ring_captures(struct call_ring *ring, uintptr_t stream) {
  int status = 0;
  if (ring->is_capturing == NULL) return false;
  if (ring->is_capturing((void *)stream, &status) != 0 || status == 0) return false;
  atomic_store_explicit(&ring->has_captured, true, memory_order_relaxed);
  return true;
}

static inline int32_t ring_next_place(struct call_ring *ring) {
  const int32_t place = atomic_load_explicit(&ring->next_place, memory_order_relaxed);
  if (place != 0) atomic_store_explicit(&ring->next_place, 0, memory_order_relaxed);
  return place;
}

static inline struct call ring_enter(struct call_ring *ring, enum sglang_fl_flagcx_operation operation,
                                     int32_t dtype, uint64_t count, int32_t peer, uintptr_t stream,
                                     int32_t place) {
  /* One thread at a time calls, so that adding need not be atomic. */
  const uint64_t number = atomic_load_explicit(&ring->entered, memory_order_relaxed) + 1;
  atomic_store_explicit(&ring->entered, number, memory_order_release);
  struct recorded_call *call = &ring->calls[number & (ring->size - 1)];
#ifndef PLANT_TORN /* what the ring's test must find */
  atomic_store_explicit(&call->number, 0, memory_order_relaxed);
#endif
#ifdef PLANT_RACE /* what the thread sanitizer must find */
  *(uint64_t *)&call->count = count;
#else
  atomic_store_explicit(&call->count, count, memory_order_release);
#endif
  atomic_store_explicit(&call->stream, stream, memory_order_release);
  RING_PAUSE();
  atomic_store_explicit(&call->ticks_in, ticks_now(), memory_order_release);
  atomic_store_explicit(&call->ticks_out, 0, memory_order_release);
  atomic_store_explicit(&call->operation, (int32_t)operation, memory_order_release);
  atomic_store_explicit(&call->dtype, dtype, memory_order_release);
  atomic_store_explicit(&call->peer, peer, memory_order_release);
  atomic_store_explicit(&call->captured, ring_captures(ring, stream), memory_order_release);
  atomic_store_explicit(&call->place, place != 0 ? place : ring_next_place(ring), memory_order_release);
  atomic_store_explicit(&call->result, 0, memory_order_release);
  atomic_store_explicit(&call->number, number, memory_order_release);
  return (struct call){call, number};
}

/* The result of the call, or MARK_DUE in the place of success. */
static inline int32_t ring_leave(struct call_ring *ring, struct call call, int32_t result) {
  struct recorded_call *recorded = call.recorded;
  /* Another call has its place only where a group's rule, one thread at a time, is broken. */
  if (atomic_load_explicit(&recorded->number, memory_order_relaxed) != call.number) return result;
  atomic_store_explicit(&recorded->result, result, memory_order_release);
  atomic_store_explicit(&recorded->ticks_out, ticks_now(), memory_order_release);
  if (result != 0 || !atomic_load_explicit(&ring->mark_due, memory_order_relaxed)) return result;
  return atomic_load_explicit(&recorded->captured, memory_order_relaxed) ? 0 : SGLANG_FL_FLAGCX_MARK_DUE;
}

struct call_ring *ring_new(size_t size, uintptr_t is_capturing);
bool ring_read(const struct call_ring *ring, uint64_t number, sglang_fl_flagcx_call *call);
size_t ring_read_all(const struct call_ring *ring, sglang_fl_flagcx_call *calls, size_t capacity);
bool ring_read_under_way(const struct call_ring *ring, sglang_fl_flagcx_call *call);

#endif
