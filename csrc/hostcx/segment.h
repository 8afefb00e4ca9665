/* The shared memory of one communicator: where it lies, how it is laid out, how ranks find it.
 *
 * It is a memfd: it has no name, so nobody can guess one and nothing is left behind however its
 * processes end; sealed against shrinking, so no process can take pages away under another; and not
 * subject to the size of /dev/shm. The process that makes the unique id holds it until all ranks have
 * mapped it; ranks reach it as /proc/PID/fd/FD, which the kernel allows to the same user alone.
 */
#ifndef HOSTCX_SEGMENT_H
#define HOSTCX_SEGMENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "invitation.h"

enum {
    CACHE_LINE = 64,
    MAXIMUM_RANKS = 256,
    /* A rank may be this many steps of a collective ahead of the slowest one. */
    STAGES = 4,
    STAGE_BYTES = 256 * 1024,
    /* What a send may leave behind without its receiver, per ordered pair of ranks. */
    LARGEST_RING_BYTES = 256 * 1024,
};

/* Life of a rank in its communicator. RANK_GAVE_UP: it failed while joining; RANK_FAILED: later. */
enum rank_state { RANK_ABSENT, RANK_JOINED, RANK_LEFT, RANK_ABORTED, RANK_FAILED, RANK_GAVE_UP };

struct segment_header {
    uint64_t magic;
    unsigned char nonce[NONCE_BYTES];
    _Atomic uint32_t nranks;
    /* Goes up when anything about the joining changes; a futex. */
    _Atomic uint32_t joining;
    /* All ranks have mapped the segment: the id is spent. */
    _Atomic uint32_t complete;
};

/* What a rank tells the others: written by that rank alone, except for the doorbell. */
struct rank_slot {
    _Alignas(CACHE_LINE) _Atomic int32_t pid;
    _Atomic uint32_t state;
    _Atomic uint64_t start_time;

    /* A futex on which the rank sleeps; others ring it when it says that it sleeps. */
    _Alignas(CACHE_LINE) _Atomic uint32_t doorbell;
    _Atomic uint32_t sleeping;

    /* Steps for which the rank has filled its stage, and what each stage is part of. */
    _Alignas(CACHE_LINE) _Atomic uint64_t posted;
    _Atomic uint64_t signatures[STAGES];

    /* Steps in which the rank has read all that it needs from the others. */
    _Alignas(CACHE_LINE) _Atomic uint64_t finished;
};

/* Bytes that ever went into and out of the ring of one ordered pair. */
struct ring_control {
    _Alignas(CACHE_LINE) _Atomic uint64_t written;
    _Alignas(CACHE_LINE) _Atomic uint64_t taken;
};

/* This process's mapping. Threads of one process that are ranks of one communicator share it. */
struct segment {
    struct segment *next;
    unsigned char nonce[NONCE_BYTES];
    int nranks;
    int references;
    size_t bytes;
    size_t ring_bytes;
    char *base;
    struct rank_slot *slots;
    struct ring_control *controls;
    char *stages;
    char *rings;
};

/* Makes a segment for a communicator yet without ranks, and the id that leads to it. */
flagcxResult_t segment_create(flagcxUniqueId *id);

/* Maps the segment that the invitation leads to, for a communicator of nranks. */
flagcxResult_t segment_open(const struct invitation *invitation, int nranks, struct segment **segment);

void segment_release(struct segment *segment);

/* Closes the descriptor of a segment that this process created, once nobody else needs it. */
void segment_forget_creation(const unsigned char *nonce);

/* How often this process is a fork of one that had communicators open. */
unsigned fork_generation(void);

static inline struct segment_header *segment_header(const struct segment *segment)
{
    return (struct segment_header *)segment->base;
}

static inline struct ring_control *ring_control(const struct segment *segment, int from, int to)
{
    return &segment->controls[(size_t)from * (size_t)segment->nranks + (size_t)to];
}

static inline char *ring_bytes(const struct segment *segment, int from, int to)
{
    return segment->rings + ((size_t)from * (size_t)segment->nranks + (size_t)to) * segment->ring_bytes;
}

static inline char *stage_bytes(const struct segment *segment, int rank, uint64_t step)
{
    return segment->stages + ((size_t)rank * STAGES + (size_t)(step % STAGES)) * STAGE_BYTES;
}

#endif
