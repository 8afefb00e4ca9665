/* A counter that is read in a third of clock_gettime's time, and what it says in nanoseconds since the epoch. */
#ifndef SGLANG_FL_FLAGCX_TICKS_H
#define SGLANG_FL_FLAGCX_TICKS_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t clock_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Whether the processor's counter runs at one rate on all cores, in every state of sleep: set before main. */
extern bool ticks_are_counted;

static inline uint64_t ticks_now(void) {
#if defined(__x86_64__)
  if (ticks_are_counted) return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#endif
  return clock_ns(CLOCK_MONOTONIC);
}

/* The counter beside the clocks at one moment. */
struct clock_reading {
  uint64_t ticks;
  uint64_t monotonic_ns;
  uint64_t epoch_ns;
};

struct clock_reading clocks_read(void);

/* Since the epoch, from two readings; the error is that of a reading, some 100 ns, for ticks between the two. */
uint64_t ticks_to_epoch_ns(uint64_t ticks, const struct clock_reading *first, const struct clock_reading *last);

#endif
