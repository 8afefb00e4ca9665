/* The shim's ring of calls, written by one thread while others read it: every entry read is of one call, whole.

   Prints "whole" and how many entries were read, or what was torn; the exit code tells as well. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static atomic_ulong rounds_read;

/* Lets every reader go round while an entry is half written. */
static void pause_at_times(void) {
  static unsigned calls; /* the writer's alone */
  if (++calls % 64 != 0) return;
  const unsigned long until = atomic_load(&rounds_read) + 8;
  while (atomic_load(&rounds_read) < until) sched_yield();
}
#define RING_PAUSE() pause_at_times()

#include "calls.h"

/* As few entries as possible, so that readers meet the writer; it goes on until they have met often enough. */
enum { SIZE = 4, CALLS = 20000, READS = 20000, READERS = 2 };

static struct call_ring *ring;
static atomic_bool written;
static atomic_ulong entries_read;
static atomic_int torn;

static int stream_is_captured(void *stream, int *status) {
  *status = (uintptr_t)stream % 3 == 0;
  return 0;
}

static void *write_calls(void *unused) {
  for (uint64_t number = 1; number <= CALLS || atomic_load(&entries_read) < READS; number++) {
    struct call call = ring_enter(ring, (enum sglang_fl_flagcx_operation)(number % SGLANG_FL_FLAGCX_OPERATIONS),
                                  (int32_t)(number % 10), number * 3, (int32_t)(number % 7), number * 5,
                                  (int32_t)number);
    ring_leave(ring, call, (int32_t)(number % 5));
  }
  atomic_store(&written, true);
  return unused;
}

static bool is_whole(const sglang_fl_flagcx_call *call) {
  const uint64_t number = call->number;
  const bool returned = call->time_out_ns != 0;
  return call->operation == (int32_t)(number % SGLANG_FL_FLAGCX_OPERATIONS) && call->dtype == (int32_t)(number % 10) &&
         call->count == number * 3 && call->peer == (int32_t)(number % 7) && call->stream == number * 5 &&
         call->captured == (number * 5 % 3 == 0) && call->place == (int32_t)number && call->time_in_ns != 0 &&
         (!returned || (call->time_out_ns >= call->time_in_ns && call->result == (int32_t)(number % 5)));
}

static void look_at(const sglang_fl_flagcx_call *call) {
  atomic_fetch_add(&entries_read, 1);
  if (is_whole(call) || atomic_exchange(&torn, 1)) return;
  printf("torn: call %llu has count %llu, stream %llu, operation %d\n", (unsigned long long)call->number,
         (unsigned long long)call->count, (unsigned long long)call->stream, call->operation);
}

static void *read_calls(void *unused) {
  sglang_fl_flagcx_call calls[SIZE];
  while (!atomic_load(&written)) {
    const size_t count = ring_read_all(ring, calls, SIZE);
    for (size_t i = 0; i < count; i++) {
      look_at(&calls[i]);
      if (i > 0 && calls[i].number <= calls[i - 1].number && !atomic_exchange(&torn, 1)) puts("torn: out of order");
    }
    if (ring_read_under_way(ring, calls)) look_at(calls);
    const uint64_t last = atomic_load(&ring->entered);
    if (ring_read(ring, last, calls)) look_at(calls);
    if (last > SIZE && ring_read(ring, last - SIZE, calls)) look_at(calls); /* the one that is being replaced */
    atomic_fetch_add(&rounds_read, 1);
  }
  return unused;
}

int main(void) {
  pthread_t writer, readers[READERS];
  ring = ring_new(SIZE, (uintptr_t)stream_is_captured);
  if (ring == NULL) return 2;
  for (int i = 0; i < READERS; i++) pthread_create(&readers[i], NULL, read_calls, NULL);
  pthread_create(&writer, NULL, write_calls, NULL);
  pthread_join(writer, NULL);
  for (int i = 0; i < READERS; i++) pthread_join(readers[i], NULL);
  if (atomic_load(&torn)) return 1;
  printf("whole: %lu\n", atomic_load(&entries_read));
  free(ring);
  return 0;
}
