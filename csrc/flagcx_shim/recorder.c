/* What a communicator's recorder can be asked and told, from any thread. */
#include <stdlib.h>

#include "internal.h"

static struct call_ring *ring_of(const sglang_fl_flagcx_communicator *communicator) {
  return communicator != NULL ? atomic_load_explicit(&communicator->calls, memory_order_acquire) : NULL;
}

int32_t sglang_fl_flagcx_record(sglang_fl_flagcx_communicator *communicator, size_t size, uintptr_t is_capturing) {
  if (communicator == NULL) return SGLANG_FL_FLAGCX_NULL_HANDLE;
  if (atomic_load(&communicator->gate.shut)) return SGLANG_FL_FLAGCX_CLOSED;
  if (size == 0 || (size & (size - 1)) != 0) return SGLANG_FL_FLAGCX_BAD_SIZE;
  if (ring_of(communicator) != NULL) return SGLANG_FL_FLAGCX_IN_USE;
  struct call_ring *ring = ring_new(size, is_capturing), *none = NULL;
  if (ring == NULL) return SGLANG_FL_FLAGCX_OUT_OF_MEMORY;
  if (atomic_compare_exchange_strong(&communicator->calls, &none, ring)) return 0;
  free(ring);
  return SGLANG_FL_FLAGCX_IN_USE;
}

/* Behind a gate that is shut for good nobody is left who writes. One that is not ended keeps its ring. */
void sglang_fl_flagcx_free_calls(sglang_fl_flagcx_communicator *communicator) {
  if (communicator == NULL || atomic_load(&communicator->fate) != ENDED) return;
  free(atomic_exchange(&communicator->calls, NULL));
}

uint64_t sglang_fl_flagcx_calls_entered(const sglang_fl_flagcx_communicator *communicator) {
  const struct call_ring *ring = ring_of(communicator);
  return ring != NULL ? atomic_load_explicit(&ring->entered, memory_order_relaxed) : 0;
}

int32_t sglang_fl_flagcx_has_captured(const sglang_fl_flagcx_communicator *communicator) {
  const struct call_ring *ring = ring_of(communicator);
  return ring != NULL && atomic_load_explicit(&ring->has_captured, memory_order_relaxed);
}

size_t sglang_fl_flagcx_read_calls(const sglang_fl_flagcx_communicator *communicator, sglang_fl_flagcx_call *calls,
                                   size_t capacity) {
  const struct call_ring *ring = ring_of(communicator);
  return ring != NULL ? ring_read_all(ring, calls, capacity) : 0;
}

int32_t sglang_fl_flagcx_read_call(const sglang_fl_flagcx_communicator *communicator, uint64_t number,
                                   sglang_fl_flagcx_call *call) {
  const struct call_ring *ring = ring_of(communicator);
  return ring != NULL && ring_read(ring, number, call);
}

int32_t sglang_fl_flagcx_call_under_way(const sglang_fl_flagcx_communicator *communicator,
                                        sglang_fl_flagcx_call *call) {
  const struct call_ring *ring = ring_of(communicator);
  return ring != NULL && ring_read_under_way(ring, call);
}

void sglang_fl_flagcx_next_place(sglang_fl_flagcx_communicator *communicator, int32_t place) {
  struct call_ring *ring = ring_of(communicator);
  if (ring != NULL) atomic_store_explicit(&ring->next_place, place, memory_order_relaxed);
}

void sglang_fl_flagcx_ask_for_mark(sglang_fl_flagcx_communicator *communicator) {
  struct call_ring *ring = ring_of(communicator);
  if (ring != NULL) atomic_store_explicit(&ring->mark_due, true, memory_order_relaxed);
}

void sglang_fl_flagcx_mark_made(sglang_fl_flagcx_communicator *communicator) {
  struct call_ring *ring = ring_of(communicator);
  if (ring != NULL) atomic_store_explicit(&ring->mark_due, false, memory_order_relaxed);
}

/* Marked before it is shut, so that a destroy that gives up does not open it again. */
void sglang_fl_flagcx_refuse(sglang_fl_flagcx_communicator *communicator) {
  if (communicator == NULL) return;
  atomic_store(&communicator->refused, true);
  atomic_store(&communicator->gate.shut, true);
}
