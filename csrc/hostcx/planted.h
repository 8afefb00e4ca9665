/* Faults that only the sanitizers' own check builds contain; the library is built with none of them. */
#ifndef HOSTCX_PLANTED_H
#define HOSTCX_PLANTED_H

/* Reads one byte past the caller's buffer: for the address sanitizer and for valgrind. */
#ifdef PLANT_OVERREAD
#define PLANTED_EXTRA_BYTES 1
#else
#define PLANTED_EXTRA_BYTES 0
#endif

/* Publishes data without ordering: for the thread sanitizer. */
#ifdef PLANT_RACE
#define PUBLISHING_ORDER memory_order_relaxed
#else
#define PUBLISHING_ORDER memory_order_seq_cst
#endif

/* Shifts by the width of the type: for the undefined behaviour sanitizer. */
#ifdef PLANT_UNDEFINED
#define PLANTED_SHIFT(rank) ((1 << (32 + (rank))) & 0)
#else
#define PLANTED_SHIFT(rank) 0
#endif

#endif
