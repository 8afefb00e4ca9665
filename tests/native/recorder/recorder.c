/* A stand-in for libflagcx that only writes down what it was called with, in any of the API's four forms.

   RECORDER_FORM  7: releases 0.7 to 0.10 (trailing communicator), 11: 0.11 and 0.12, 13: 0.13, 14: the head.
   RECORDER_ID_BYTES  size of its unique id, 256 unless a test says otherwise.
   Written from flagcx.h of those releases, independently of the repository's own declarations. A symbol that a
   test wants absent is hidden by the linker. recorder_* functions are the test's side of it. */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef RECORDER_ID_BYTES
#define RECORDER_ID_BYTES 256
#endif

enum { LOG_BYTES = 1 << 20, ANSWERS = 64, NAME_BYTES = 64, HALF_BUILT = 0xdead0 };

struct answer {
  char name[NAME_BYTES];
  int code;
  int block;
};

struct comm {
  int rank, world_size, ended;
};

struct box {
  void *raw;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[LOG_BYTES];
static size_t log_used;
static struct answer answers[ANSWERS];
static unsigned char next_id[RECORDER_ID_BYTES];
static char vendor_name[128] = "RECORDER";
static char last_error[256] = "Not implemented.";
static int async_error, device;

/* The test's side */

/* Whole lines up to now; returns how many bytes there are, which may be more than fit. */
size_t recorder_copy(char *into, size_t bytes) {
  pthread_mutex_lock(&lock);
  size_t used = log_used;
  if (used <= bytes) memcpy(into, log_text, used);
  pthread_mutex_unlock(&lock);
  return used;
}

void recorder_reset(void) {
  pthread_mutex_lock(&lock);
  log_used = 0;
  log_text[0] = '\0';
  pthread_mutex_unlock(&lock);
}

static struct answer *answer_to(const char *name, int make) {
  for (int i = 0; i < ANSWERS; i++) {
    if (strcmp(answers[i].name, name) == 0) return &answers[i];
    if (answers[i].name[0] != '\0') continue;
    if (!make) return NULL;
    snprintf(answers[i].name, NAME_BYTES, "%s", name);
    return &answers[i];
  }
  abort();
}

void recorder_answer(const char *name, int code) {
  answer_to(name, 1)->code = code;
}

void recorder_block(const char *name, int block) {
  __atomic_store_n(&answer_to(name, 1)->block, block, __ATOMIC_SEQ_CST);
}

void recorder_set_unique_id(const unsigned char *id) {
  memcpy(next_id, id, RECORDER_ID_BYTES);
}

void recorder_set_vendor(const char *name) {
  snprintf(vendor_name, sizeof vendor_name, "%s", name);
}

void recorder_set_last_error(const char *text) {
  snprintf(last_error, sizeof last_error, "%s", text);
}

void recorder_set_async_error(int code) {
  async_error = code;
}

/* The library's side */

/* One line a call; then whatever the test wants: nothing, a wait, a result. */
static int called(const char *name, const char *format, ...) {
  va_list values;
  pthread_mutex_lock(&lock);
  int room = (int)(LOG_BYTES - log_used);
  int used = snprintf(log_text + log_used, room, "%s ", name);
  va_start(values, format);
  used += vsnprintf(log_text + log_used + used, room - used, format, values);
  va_end(values);
  used += snprintf(log_text + log_used + used, room - used, "\n");
  if (used >= room) abort();
  log_used += used;
  pthread_mutex_unlock(&lock);
  struct answer *answer = answer_to(name, 0);
  if (answer == NULL) return 0;
  while (__atomic_load_n(&answer->block, __ATOMIC_SEQ_CST)) usleep(1000);
  return answer->code;
}

/* A half-built or ended communicator crashes the real library; here it stops the test loudly. */
static int rank_of(const void *handle) {
  const struct comm *comm = handle;
  if (handle == NULL) return -1;
  if ((uintptr_t)handle == HALF_BUILT || comm->ended) abort();
  return comm->rank;
}

static const char *stream_of(const void *boxed, char *text) {
  const struct box *box = boxed;
  if (box == NULL) return "NULL";
  sprintf(text, "%llu box=%llu", (unsigned long long)(uintptr_t)box->raw, (unsigned long long)(uintptr_t)box);
  return text;
}

typedef unsigned long long number;
#define ADDRESS(pointer) ((number)(uintptr_t)(pointer))

/* Device functions: the entries that a binding may use; any other ends the process. */

static int forbidden(void) {
  fprintf(stderr, "recorder: a device function outside 0 to 16, or one that was not expected, was called\n");
  abort();
}
static int device_synchronize(void) {
  return called("deviceSynchronize", "");
}
static int set_device(int wanted) {
  device = wanted;
  return called("setDevice", "device=%d", wanted);
}
static int get_device(int *current) {
  *current = device;
  return called("getDevice", "");
}
static int get_device_count(int *count) {
  *count = 4;
  return called("getDeviceCount", "");
}
static int get_vendor(char *name) {
  strcpy(name, vendor_name);
  return called("getVendor", "");
}
static int stream_copy(void **stream, void *raw) {
  struct box *box = malloc(sizeof *box);
  box->raw = raw;
  *stream = box;
  return called("streamCopy", "raw=%llu box=%llu", ADDRESS(raw), ADDRESS(box));
}
static int stream_free(void *stream) {
  int code = called("streamFree", "box=%llu", ADDRESS(stream));
  free(stream);
  return code;
}
static int stream_synchronize(void *stream) {
  char text[64];
  return called("streamSynchronize", "stream=%s", stream_of(stream, text));
}

#define FORBIDDEN (void *)forbidden
static void *const device_functions[] = {
    (void *)device_synchronize, FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN, (void *)set_device,
    (void *)get_device, (void *)get_device_count, (void *)get_vendor, FORBIDDEN, FORBIDDEN, FORBIDDEN,
    (void *)stream_copy, (void *)stream_free, (void *)stream_synchronize, FORBIDDEN, FORBIDDEN, FORBIDDEN,
    FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN};

static void *copy_of_device_functions(void) {
  void *copy = malloc(sizeof device_functions);
  memcpy(copy, device_functions, sizeof device_functions);
  return copy;
}

struct group {
  void *id, *comm, *handle;
};

#if RECORDER_FORM >= 13
int flagcxDeviceHandleInit(void **handle) {
  *handle = copy_of_device_functions();
  return called("flagcxDeviceHandleInit", "");
}
int flagcxDeviceHandleFree(void *handle) {
  free(handle);
  return called("flagcxDeviceHandleFree", "");
}
int flagcxGetUniqueId(unsigned char *id) {
  memcpy(id, next_id, RECORDER_ID_BYTES);
  return called("flagcxGetUniqueId", "form=pointer");
}
#else
int flagcxGetUniqueId(void **id) {
  *id = calloc(1, RECORDER_ID_BYTES);
  memcpy(*id, next_id, RECORDER_ID_BYTES);
  return called("flagcxGetUniqueId", "form=pointer_to_pointer");
}
#endif
int flagcxHandleInit(struct group **group) {
  *group = calloc(1, sizeof **group);
  (*group)->handle = copy_of_device_functions();
  return called("flagcxHandleInit", "");
}
int flagcxHandleFree(struct group *group) {
  free(group->handle);
  free(group);
  return called("flagcxHandleFree", "");
}

int flagcxCommInitRank(void **handle, int world_size, unsigned char *id, int rank) {
  static char hex[2 * RECORDER_ID_BYTES + 1];
  for (int i = 0; i < RECORDER_ID_BYTES; i++) sprintf(hex + 2 * i, "%02x", id[i]);
#if RECORDER_FORM == 11 || RECORDER_FORM == 13
  memset(id, 0x11, 64); /* these releases write into the id they are given */
#endif
  *handle = (void *)(uintptr_t)HALF_BUILT;
  int code = called("flagcxCommInitRank", "world_size=%d rank=%d device=%d id=%s", world_size, rank, device, hex);
  if (code != 0) return code;
  struct comm *comm = calloc(1, sizeof *comm);
  comm->rank = rank;
  comm->world_size = world_size;
  *handle = comm;
  return 0;
}
int flagcxCommDestroy(void *comm) {
  int code = called("flagcxCommDestroy", "rank=%d", rank_of(comm));
  ((struct comm *)comm)->ended = 1; /* kept, so that a use after it is seen */
  return code;
}
int flagcxCommAbort(void *comm) {
  int code = called("flagcxCommAbort", "rank=%d", rank_of(comm));
  ((struct comm *)comm)->ended = 1;
  return code;
}
int flagcxCommFinalize(void *comm) {
  (void)comm;
  fprintf(stderr, "recorder: flagcxCommFinalize was called, which frees what flagcxCommDestroy needs\n");
  abort();
}
int flagcxCommGetAsyncError(void *comm, int *error) {
  *error = async_error;
  return called("flagcxCommGetAsyncError", "rank=%d", rank_of(comm));
}
int flagcxCommCount(void *comm, int *count) {
  *count = ((struct comm *)comm)->world_size;
  return called("flagcxCommCount", "rank=%d", rank_of(comm));
}
int flagcxCommUserRank(void *comm, int *rank) {
  *rank = rank_of(comm);
  return called("flagcxCommUserRank", "rank=%d", *rank);
}
int flagcxCommGetDeviceNumber(void *comm, int *number_of_device) {
  *number_of_device = device;
  return called("flagcxCommGetDeviceNumber", "rank=%d", rank_of(comm));
}
int flagcxIsHomoComm(void *comm, int *homogeneous) {
  *homogeneous = 1;
  return called("flagcxIsHomoComm", "rank=%d", rank_of(comm));
}
const char *flagcxGetLastError(void *comm) {
  rank_of(comm);
  return last_error;
}

#define PLAIN "send=%llu recv=%llu count=%llu dtype=%d "
#define END "rank=%d stream=%s"

int flagcxAllReduce(const void *send, void *recv, size_t count, int dtype, int op, void *comm, void *stream) {
  char text[64];
  return called("flagcxAllReduce", PLAIN "op=%d " END, ADDRESS(send), ADDRESS(recv), (number)count, dtype, op,
                rank_of(comm), stream_of(stream, text));
}
int flagcxReduce(const void *send, void *recv, size_t count, int dtype, int op, int root, void *comm, void *stream) {
  char text[64];
  return called("flagcxReduce", PLAIN "op=%d root=%d " END, ADDRESS(send), ADDRESS(recv), (number)count, dtype, op,
                root, rank_of(comm), stream_of(stream, text));
}
int flagcxReduceScatter(const void *send, void *recv, size_t count, int dtype, int op, void *comm, void *stream) {
  char text[64];
  return called("flagcxReduceScatter", PLAIN "op=%d " END, ADDRESS(send), ADDRESS(recv), (number)count, dtype, op,
                rank_of(comm), stream_of(stream, text));
}
int flagcxAllGather(const void *send, void *recv, size_t count, int dtype, void *comm, void *stream) {
  char text[64];
  return called("flagcxAllGather", PLAIN END, ADDRESS(send), ADDRESS(recv), (number)count, dtype, rank_of(comm),
                stream_of(stream, text));
}
int flagcxAlltoAll(const void *send, void *recv, size_t count, int dtype, void *comm, void *stream) {
  char text[64];
  return called("flagcxAlltoAll", PLAIN END, ADDRESS(send), ADDRESS(recv), (number)count, dtype, rank_of(comm),
                stream_of(stream, text));
}

#define ROOTED(function)                                                                                          \
  int function(const void *send, void *recv, size_t count, int dtype, int root, void *comm, void *stream) {      \
    char text[64];                                                                                                \
    return called(#function, PLAIN "root=%d " END, ADDRESS(send), ADDRESS(recv), (number)count, dtype, root,     \
                  rank_of(comm), stream_of(stream, text));                                                       \
  }
ROOTED(flagcxBroadcast)
ROOTED(flagcxGather)
ROOTED(flagcxScatter)

int flagcxAlltoAllv(const void *send, size_t *send_counts, size_t *send_offsets, void *recv, size_t *recv_counts,
                    size_t *recv_offsets, int dtype, void *comm, void *stream) {
  char text[64];
  int last = ((struct comm *)comm)->world_size - 1;
  return called("flagcxAlltoAllv",
                "send=%llu recv=%llu last_send_count=%llu last_send_offset=%llu last_recv_count=%llu "
                "last_recv_offset=%llu dtype=%d " END,
                ADDRESS(send), ADDRESS(recv), (number)send_counts[last], (number)send_offsets[last],
                (number)recv_counts[last], (number)recv_offsets[last], dtype, rank_of(comm), stream_of(stream, text));
}
int flagcxBarrier(void *comm, void *stream) {
  char text[64];
  return called("flagcxBarrier", END, rank_of(comm), stream_of(stream, text));
}
int flagcxSend(const void *buffer, size_t count, int dtype, int peer, void *comm, void *stream) {
  char text[64];
  return called("flagcxSend", "buffer=%llu count=%llu dtype=%d peer=%d " END, ADDRESS(buffer), (number)count, dtype,
                peer, rank_of(comm), stream_of(stream, text));
}
int flagcxRecv(void *buffer, size_t count, int dtype, int peer, void *comm, void *stream) {
  char text[64];
  return called("flagcxRecv", "buffer=%llu count=%llu dtype=%d peer=%d " END, ADDRESS(buffer), (number)count, dtype,
                peer, rank_of(comm), stream_of(stream, text));
}
int flagcxGroupStart(void *comm) {
  return called("flagcxGroupStart", "rank=%d", rank_of(comm));
}
int flagcxGroupEnd(void *comm) {
  return called("flagcxGroupEnd", "rank=%d", rank_of(comm));
}

/* The trailing argument by form: a communicator that must be NULL, none at all, or the allocator. */
#if RECORDER_FORM == 7
#define TRAILING , void *trailing
#define MEMORY_TRAILING TRAILING
#define REGISTER_TRAILING
#elif RECORDER_FORM == 14
#define TRAILING , int trailing
#define MEMORY_TRAILING TRAILING
#define REGISTER_TRAILING TRAILING
#else
#define MEMORY_TRAILING
#define REGISTER_TRAILING
#endif
#if RECORDER_FORM == 7 || RECORDER_FORM == 14
#define MEMORY_VALUE ((int)(intptr_t)trailing)
#else
#define MEMORY_VALUE 0
#endif
#if RECORDER_FORM == 14
#define REGISTER_VALUE trailing
#else
#define REGISTER_VALUE 0
#endif

int flagcxMemAlloc(void **buffer, size_t bytes MEMORY_TRAILING) {
#if RECORDER_FORM == 7
  if (*buffer != NULL) return 0; /* these releases take it for memory that is already there */
#endif
  *buffer = (void *)0x7000;
  return called("flagcxMemAlloc", "bytes=%llu trailing=%d", (number)bytes, MEMORY_VALUE);
}
int flagcxMemFree(void *buffer MEMORY_TRAILING) {
  return called("flagcxMemFree", "buffer=%llu trailing=%d", ADDRESS(buffer), MEMORY_VALUE);
}
int flagcxCommRegister(void *comm, void *buffer, size_t bytes, void **registration REGISTER_TRAILING) {
  *registration = (void *)0x8000;
  return called("flagcxCommRegister", "rank=%d buffer=%llu bytes=%llu trailing=%d", rank_of(comm), ADDRESS(buffer),
                (number)bytes, REGISTER_VALUE);
}
int flagcxCommDeregister(void *comm, void *registration REGISTER_TRAILING) {
  return called("flagcxCommDeregister", "rank=%d registration=%llu trailing=%d", rank_of(comm),
                ADDRESS(registration), REGISTER_VALUE);
}
int flagcxCommWindowRegister(void *comm, void *buffer, size_t bytes, void **window, int flags REGISTER_TRAILING) {
  if (*window != NULL) return 4;
  *window = (void *)0x9000;
  return called("flagcxCommWindowRegister", "rank=%d buffer=%llu bytes=%llu flags=%d trailing=%d", rank_of(comm),
                ADDRESS(buffer), (number)bytes, flags, REGISTER_VALUE);
}
int flagcxCommWindowDeregister(void *comm, void *window REGISTER_TRAILING) {
  return called("flagcxCommWindowDeregister", "rank=%d window=%llu trailing=%d", rank_of(comm), ADDRESS(window),
                REGISTER_VALUE);
}
