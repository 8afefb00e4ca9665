/* The processor's counter: whether it can be trusted, and its rate, measured against the clock. */
#include "ticks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

bool ticks_are_counted;

__attribute__((constructor)) static void look_at_processor(void) {
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  /* Advanced power management: invariant TSC. A hypervisor shows it only where it also keeps it. */
  ticks_are_counted = __get_cpuid(0x80000007, &eax, &ebx, &ecx, &edx) && (edx & (1u << 8)) != 0;
#endif
}

struct clock_reading clocks_read(void) {
  const uint64_t monotonic_ns = clock_ns(CLOCK_MONOTONIC);
  return (struct clock_reading){ticks_now(), monotonic_ns, clock_ns(CLOCK_REALTIME)};
}

uint64_t ticks_to_epoch_ns(uint64_t ticks, const struct clock_reading *first, const struct clock_reading *last) {
  const double ago = (double)(int64_t)(last->ticks - ticks);
  const double elapsed = (double)(last->ticks - first->ticks);
  const double ns_per_tick = elapsed > 0 ? (double)(last->monotonic_ns - first->monotonic_ns) / elapsed : 1.0;
  return last->epoch_ns - (uint64_t)(int64_t)(ago * ns_per_tick);
}
