/* Boxed streams: libflagcx takes a pointer to a box that holds the raw stream; one box is kept per raw stream. */
#include <stdlib.h>

#include "internal.h"

void streams_init(struct stream_table *streams) {
  pthread_mutex_init(&streams->adding, NULL);
}

static _Atomic(struct boxed_stream *) *bucket_of(struct stream_table *streams, uintptr_t raw) {
  /* Device streams are aligned addresses: the low bits say nothing. */
  return &streams->buckets[((raw >> 4) ^ (raw >> 12)) % STREAM_BUCKETS];
}

static struct boxed_stream *find(_Atomic(struct boxed_stream *) *bucket, uintptr_t raw) {
  struct boxed_stream *entry = atomic_load_explicit(bucket, memory_order_acquire);
  while (entry != NULL && entry->raw != raw) entry = entry->next;
  return entry;
}

static int32_t add(sglang_fl_flagcx_library *library, _Atomic(struct boxed_stream *) *bucket, uintptr_t raw,
                   struct boxed_stream **added) {
  int (*stream_copy)(void **, void *) = (int (*)(void **, void *))library->device_functions[STREAM_COPY];
  struct boxed_stream *entry = calloc(1, sizeof *entry);
  if (entry == NULL) return SGLANG_FL_FLAGCX_OUT_OF_MEMORY;
  entry->raw = raw;
  int32_t code = stream_copy(&entry->box, (void *)raw);
  if (code == 0 && entry->box == NULL) code = SGLANG_FL_FLAGCX_NO_MEMORY_GIVEN;
  if (code != 0) {
    free(entry);
    return code;
  }
  entry->next = atomic_load_explicit(bucket, memory_order_relaxed);
  atomic_store_explicit(bucket, entry, memory_order_release);
  *added = entry;
  return 0;
}

int32_t streams_box(sglang_fl_flagcx_communicator *communicator, uintptr_t raw, void **box) {
  struct stream_table *streams = &communicator->streams;
  _Atomic(struct boxed_stream *) *bucket = bucket_of(streams, raw);
  int32_t code = 0;
  struct boxed_stream *entry = find(bucket, raw);
  if (entry == NULL) {
    pthread_mutex_lock(&streams->adding);
    entry = find(bucket, raw);
    if (entry == NULL) code = add(communicator->library, bucket, raw, &entry);
    pthread_mutex_unlock(&streams->adding);
  }
  if (code != 0) return code;
  atomic_store_explicit(&streams->last, entry, memory_order_release);
  *box = entry->box;
  return 0;
}

/* Only behind a shut gate. A box is freed, the stream in it is its owner's. */
void streams_free(sglang_fl_flagcx_communicator *communicator) {
  int (*stream_free)(void *) = (int (*)(void *))communicator->library->device_functions[STREAM_FREE];
  struct stream_table *streams = &communicator->streams;
  atomic_store_explicit(&streams->last, NULL, memory_order_release);
  for (size_t i = 0; i < STREAM_BUCKETS; i++) {
    struct boxed_stream *entry = atomic_exchange_explicit(&streams->buckets[i], NULL, memory_order_acq_rel);
    while (entry != NULL) {
      struct boxed_stream *next = entry->next;
      stream_free(entry->box);
      free(entry);
      entry = next;
    }
  }
}
