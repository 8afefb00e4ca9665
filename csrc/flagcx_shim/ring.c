/* Making and reading the ring of a communicator's last calls; writing it lies on the call path, in calls.h. */
#include <stdlib.h>
#include <string.h>

#include "calls.h"

struct call_ring *ring_new(size_t size, uintptr_t is_capturing) {
  const size_t bytes = offsetof(struct call_ring, calls) + size * sizeof(struct recorded_call);
  struct call_ring *ring = aligned_alloc(_Alignof(struct recorded_call), bytes);
  if (ring == NULL) return NULL;
  memset((void *)ring, 0, bytes);
  ring->size = size;
  ring->made = clocks_read();
  ring->is_capturing = (int (*)(void *, int *))is_capturing;
  return ring;
}

/* Ticks stand where the times will be. */
static bool copy_call(const struct call_ring *ring, uint64_t number, sglang_fl_flagcx_call *call) {
  const struct recorded_call *recorded = &ring->calls[number & (ring->size - 1)];
  if (number == 0 || atomic_load_explicit(&recorded->number, memory_order_acquire) != number) return false;
  call->number = number;
  /* The time out before the result: it is stored after it. */
  call->time_out_ns = atomic_load_explicit(&recorded->ticks_out, memory_order_acquire);
  call->result = atomic_load_explicit(&recorded->result, memory_order_acquire);
  call->count = atomic_load_explicit(&recorded->count, memory_order_acquire);
  call->stream = atomic_load_explicit(&recorded->stream, memory_order_acquire);
  call->time_in_ns = atomic_load_explicit(&recorded->ticks_in, memory_order_acquire);
  call->operation = atomic_load_explicit(&recorded->operation, memory_order_acquire);
  call->dtype = atomic_load_explicit(&recorded->dtype, memory_order_acquire);
  call->peer = atomic_load_explicit(&recorded->peer, memory_order_acquire);
  call->captured = atomic_load_explicit(&recorded->captured, memory_order_acquire);
  call->place = atomic_load_explicit(&recorded->place, memory_order_acquire);
  return atomic_load_explicit(&recorded->number, memory_order_relaxed) == number;
}

static void tell_times(const struct call_ring *ring, const struct clock_reading *now, sglang_fl_flagcx_call *call) {
  call->time_in_ns = ticks_to_epoch_ns(call->time_in_ns, &ring->made, now);
  if (call->time_out_ns == 0) return;
  const uint64_t time_out_ns = ticks_to_epoch_ns(call->time_out_ns, &ring->made, now);
  call->time_out_ns = time_out_ns > call->time_in_ns ? time_out_ns : call->time_in_ns; /* cores differ by a few ticks */
}

bool ring_read(const struct call_ring *ring, uint64_t number, sglang_fl_flagcx_call *call) {
  if (!copy_call(ring, number, call)) return false;
  const struct clock_reading now = clocks_read();
  tell_times(ring, &now, call);
  return true;
}

static uint64_t oldest(const struct call_ring *ring, uint64_t last) {
  return last > ring->size ? last - ring->size + 1 : 1;
}

size_t ring_read_all(const struct call_ring *ring, sglang_fl_flagcx_call *calls, size_t capacity) {
  const uint64_t last = atomic_load_explicit(&ring->entered, memory_order_acquire);
  size_t read = 0;
  for (uint64_t number = oldest(ring, last); number <= last && read < capacity; number++)
    read += copy_call(ring, number, &calls[read]);
  const struct clock_reading now = clocks_read();
  for (size_t i = 0; i < read; i++) tell_times(ring, &now, &calls[i]);
  return read;
}

bool ring_read_under_way(const struct call_ring *ring, sglang_fl_flagcx_call *call) {
  const uint64_t last = atomic_load_explicit(&ring->entered, memory_order_acquire);
  for (uint64_t number = oldest(ring, last); number <= last; number++) {
    const struct recorded_call *recorded = &ring->calls[number & (ring->size - 1)];
    if (atomic_load_explicit(&recorded->ticks_out, memory_order_relaxed) != 0) continue;
    if (ring_read(ring, number, call) && call->time_out_ns == 0) return true;
  }
  return false;
}
