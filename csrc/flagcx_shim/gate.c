/* Waiting at a gate for the calls inside: polled, since it happens once in a communicator's life. */
#include "gate.h"

#include <time.h>

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

bool gate_shut(struct gate *gate, double seconds) {
  const struct timespec pause = {.tv_sec = 0, .tv_nsec = 1000000};
  const double limit = now_s() + seconds;
  atomic_store_explicit(&gate->shut, true, memory_order_seq_cst);
  while (atomic_load_explicit(&gate->inside, memory_order_seq_cst) != 0) {
    if (now_s() >= limit) return false;
    nanosleep(&pause, NULL);
  }
  return true;
}
