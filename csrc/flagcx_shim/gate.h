/* A gate counts the calls inside and can be shut: nothing is ended under a call that is still running. */
#ifndef SGLANG_FL_FLAGCX_GATE_H
#define SGLANG_FL_FLAGCX_GATE_H

#include <stdatomic.h>
#include <stdbool.h>

struct gate {
  atomic_int inside;
  atomic_bool shut;
};

static inline void gate_leave(struct gate *gate) {
  atomic_fetch_sub_explicit(&gate->inside, 1, memory_order_release);
}

/* Announce first, look second; gate_shut does the reverse, so that one of the two always sees the other. */
static inline bool gate_enter(struct gate *gate) {
  atomic_fetch_add_explicit(&gate->inside, 1, memory_order_seq_cst);
  if (!atomic_load_explicit(&gate->shut, memory_order_seq_cst)) return true;
  gate_leave(gate);
  return false;
}

/* Let nobody in any more and wait up to seconds for those inside; false if some are still there. */
bool gate_shut(struct gate *gate, double seconds);

static inline void gate_reopen(struct gate *gate) {
  atomic_store_explicit(&gate->shut, false, memory_order_seq_cst);
}

#endif
