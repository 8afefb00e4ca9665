/* Library calls that may block for ever run in a thread of their own, which its waiter can give up.

   FlagCX offers no time limit: an absent peer blocks flagcxCommInitRank without end, and flagcxCommAbort was
   seen not to return. A job is shared by its thread and its waiter and freed by the later of the two. What an
   abandoned creation makes is never used and never destroyed: both could touch peers that have moved on. Its
   thread aborts it, which is local, so that a peer that came late gets an error and does not wait for ever. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "internal.h"

struct sglang_fl_flagcx_job {
  pthread_mutex_t lock;
  pthread_cond_t finished;
  pthread_cond_t claimed;
  bool done;
  bool taken;    /* the waiter has the communicator created */
  bool released; /* the waiter has left */
  int owners;
  int32_t result;
  void (*work)(sglang_fl_flagcx_job *job);
  sglang_fl_flagcx_library *library;
  sglang_fl_flagcx_communicator *communicator; /* created by it, or to be ended by it */
  double drain_s;
  int32_t world_size, rank, device;
  size_t unique_id_bytes;
  uint8_t unique_id[SGLANG_FL_FLAGCX_UNIQUE_ID_CAPACITY];
  char message[1024]; /* what the library says of a result that is not 0 */
};

/* Asked in the job's own thread: libraries keep the last error per thread. */
static void job_ask_message(sglang_fl_flagcx_job *job) {
  if (job->result <= 0 || !job->library->present.flagcxGetLastError) return;
  const char *text = job->library->functions.flagcxGetLastError(NULL);
  if (text != NULL) snprintf(job->message, sizeof job->message, "%s", text);
}

static void job_drop(sglang_fl_flagcx_job *job) {
  pthread_mutex_lock(&job->lock);
  bool last = --job->owners == 0;
  pthread_mutex_unlock(&job->lock);
  if (!last) return;
  pthread_cond_destroy(&job->claimed);
  pthread_cond_destroy(&job->finished);
  pthread_mutex_destroy(&job->lock);
  free(job);
}

static void abort_unless_taken(sglang_fl_flagcx_job *job);

static void *job_thread(void *argument) {
  sglang_fl_flagcx_job *job = argument;
  job->work(job);
  pthread_mutex_lock(&job->lock);
  job->done = true;
  pthread_cond_broadcast(&job->finished);
  pthread_mutex_unlock(&job->lock);
  abort_unless_taken(job);
  job_drop(job);
  return NULL;
}

static sglang_fl_flagcx_job *job_new(sglang_fl_flagcx_library *library, void (*work)(sglang_fl_flagcx_job *)) {
  sglang_fl_flagcx_job *job = calloc(1, sizeof *job);
  if (job == NULL) return NULL;
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&job->finished, &monotonic);
  pthread_condattr_destroy(&monotonic);
  pthread_cond_init(&job->claimed, NULL);
  pthread_mutex_init(&job->lock, NULL);
  job->owners = 1;
  job->work = work;
  job->library = library;
  return job;
}

/* Signals stay with the threads of the process that expect them. */
static int start_thread(sglang_fl_flagcx_job *job) {
  sigset_t all, before;
  pthread_t thread;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = pthread_create(&thread, NULL, job_thread, job);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (failed) return failed;
  pthread_setname_np(thread, "flagcx-job");
  pthread_detach(thread);
  return 0;
}

static void work_interrupt(sglang_fl_flagcx_job *job);

static sglang_fl_flagcx_job *job_start(sglang_fl_flagcx_job *job, int32_t *code) {
  job->owners = 2; /* the thread and the caller */
  *code = start_thread(job) == 0 ? 0 : SGLANG_FL_FLAGCX_NO_THREAD;
  if (*code == 0) return job;
  if (job->work == work_interrupt) { /* or a call that hangs would never end: its caller waits for it itself */
    *code = 0;
    job_thread(job);
    return job;
  }
  job->owners = 1;
  job_drop(job);
  return NULL;
}

/* unique id */

/* A library may write a longer id than flagcx.h declares. What lies behind the declared bytes is filled with a
   pattern; if it changed, all bytes that the shim can carry are the id, whatever its true size is. */
static const uint8_t UNTOUCHED = 0xA5;

static int32_t new_form_unique_id(sglang_fl_flagcx_job *job) {
  memset(job->unique_id + SGLANG_FL_FLAGCX_UNIQUE_ID_BYTES, UNTOUCHED,
         sizeof job->unique_id - SGLANG_FL_FLAGCX_UNIQUE_ID_BYTES);
  int32_t code = job->library->functions.flagcxGetUniqueId(job->unique_id);
  job->unique_id_bytes = SGLANG_FL_FLAGCX_UNIQUE_ID_BYTES;
  for (size_t i = SGLANG_FL_FLAGCX_UNIQUE_ID_BYTES; i < sizeof job->unique_id; i++) {
    if (job->unique_id[i] != UNTOUCHED) job->unique_id_bytes = sizeof job->unique_id;
  }
  return code;
}

/* Before 0.13 the library allocates the id itself, of the declared size, and leaves freeing it to the caller. */
static int32_t old_form_unique_id(sglang_fl_flagcx_job *job) {
  void *allocated = NULL;
  int32_t code = job->library->functions.flagcxGetUniqueId(&allocated);
  job->unique_id_bytes = SGLANG_FL_FLAGCX_UNIQUE_ID_BYTES;
  if (code == 0 && allocated == NULL) return SGLANG_FL_FLAGCX_NO_MEMORY_GIVEN;
  if (code == 0) memcpy(job->unique_id, allocated, SGLANG_FL_FLAGCX_UNIQUE_ID_BYTES);
  free(allocated);
  return code;
}

static void work_unique_id(sglang_fl_flagcx_job *job) {
  job->result = job->library->present.flagcxDeviceHandleInit ? new_form_unique_id(job) : old_form_unique_id(job);
  job_ask_message(job);
  gate_leave(&job->library->gate);
}

sglang_fl_flagcx_job *sglang_fl_flagcx_start_unique_id(sglang_fl_flagcx_library *library, int32_t *code) {
  *code = library_enter(library);
  if (*code != 0) return NULL;
  sglang_fl_flagcx_job *job = job_new(library, work_unique_id);
  if (job == NULL) *code = SGLANG_FL_FLAGCX_OUT_OF_MEMORY;
  if (job != NULL) job = job_start(job, code);
  if (job == NULL) gate_leave(&library->gate);
  return job;
}

/* creation */

/* On failure the library leaves a half-built communicator behind: using or destroying it crashes, so it is
   dropped. On success its place inside the library's gate passes to the communicator. */
static void work_init(sglang_fl_flagcx_job *job) {
  void *comm = NULL;
  job->result = job->device < 0 ? 0 : library_set_device(job->library, job->device);
  if (job->result == 0)
    job->result =
        job->library->functions.flagcxCommInitRank(&comm, job->world_size, job->unique_id, job->rank);
  job_ask_message(job);
  if (job->result == 0 && comm == NULL) job->result = SGLANG_FL_FLAGCX_NO_MEMORY_GIVEN;
  if (job->result == 0) {
    job->communicator = communicator_new(job->library, comm, job->device);
    if (job->communicator == NULL) job->result = SGLANG_FL_FLAGCX_OUT_OF_MEMORY;
  }
  if (job->result != 0) gate_leave(&job->library->gate);
}

/* The id is copied here, per call: 0.12 and 0.13 write into the one they are given. */
sglang_fl_flagcx_job *sglang_fl_flagcx_start_init(sglang_fl_flagcx_library *library, const uint8_t *unique_id,
                                                  size_t unique_id_bytes, int32_t world_size, int32_t rank,
                                                  int32_t device, int32_t *code) {
  *code = library_enter(library);
  if (*code != 0) return NULL;
  sglang_fl_flagcx_job *job = NULL;
  if (unique_id == NULL || unique_id_bytes < SGLANG_FL_FLAGCX_UNIQUE_ID_BYTES ||
      unique_id_bytes > SGLANG_FL_FLAGCX_UNIQUE_ID_CAPACITY) {
    *code = SGLANG_FL_FLAGCX_BAD_UNIQUE_ID;
  } else if ((job = job_new(library, work_init)) == NULL) {
    *code = SGLANG_FL_FLAGCX_OUT_OF_MEMORY;
  } else {
    memcpy(job->unique_id, unique_id, unique_id_bytes);
    job->world_size = world_size;
    job->rank = rank;
    job->device = device;
    job = job_start(job, code);
  }
  if (job == NULL) gate_leave(&library->gate);
  return job;
}

/* ending */

static bool stays_shut(sglang_fl_flagcx_communicator *communicator) {
  return atomic_load(&communicator->abort_tried) || atomic_load(&communicator->refused);
}

/* An abort may come between the question and the reopening: it marks first and shuts second, so it is asked
   for again. */
static void reopen_unless_aborted(sglang_fl_flagcx_communicator *communicator) {
  if (stays_shut(communicator)) return;
  gate_reopen(&communicator->gate);
  if (stays_shut(communicator)) atomic_store(&communicator->gate.shut, true);
}

static void end(sglang_fl_flagcx_job *job, int (*how)(void *)) {
  sglang_fl_flagcx_communicator *communicator = job->communicator;
  if (!gate_shut(&communicator->gate, job->drain_s)) {
    reopen_unless_aborted(communicator);
    job->result = SGLANG_FL_FLAGCX_IN_USE;
    atomic_store(&communicator->fate, LIVE);
    return;
  }
  atomic_store(&communicator->fate, ENDING);
  if (communicator->creation_device >= 0) library_set_device(job->library, communicator->creation_device);
  job->result = how(communicator->comm);
  streams_free(communicator);
  atomic_store(&communicator->fate, ENDED);
  gate_leave(&job->library->gate);
}

/* A destroy that finds calls in flight leaves the communicator usable, unless an abort was tried. */
static void work_destroy(sglang_fl_flagcx_job *job) {
  end(job, job->library->functions.flagcxCommDestroy);
}

/* An abort that finds calls in flight keeps further ones out, and can be tried again. */
static void work_abort(sglang_fl_flagcx_job *job) {
  end(job, job->library->functions.flagcxCommAbort);
}

/* Under calls in flight, which the library lets return; its handle must stay valid for them, as hostcx's does. */
static void work_interrupt(sglang_fl_flagcx_job *job) {
  sglang_fl_flagcx_communicator *communicator = job->communicator;
  atomic_store(&communicator->fate, ENDING);
  job->result = job->library->functions.flagcxCommAbort(communicator->comm);
  if (!gate_shut(&communicator->gate, job->drain_s)) {
    job->result = SGLANG_FL_FLAGCX_IN_USE;
    atomic_store(&communicator->fate, GIVEN_UP);
    return;
  }
  streams_free(communicator);
  atomic_store(&communicator->fate, ENDED);
  gate_leave(&job->library->gate);
}

/* A creation is the waiter's once it takes it. Whether the waiter leaves before or after the creation is done,
   what it did not take is aborted here. */
static void abort_unless_taken(sglang_fl_flagcx_job *job) {
  if (job->work != work_init || job->result != 0) return;
  pthread_mutex_lock(&job->lock);
  while (!job->taken && !job->released) pthread_cond_wait(&job->claimed, &job->lock);
  const bool taken = job->taken;
  pthread_mutex_unlock(&job->lock);
  if (!taken && job->library->present.flagcxCommAbort) work_abort(job);
}

static sglang_fl_flagcx_job *start_end(sglang_fl_flagcx_communicator *communicator, double drain_s,
                                       void (*work)(sglang_fl_flagcx_job *), int32_t *code) {
  int fate = LIVE;
  if (!atomic_compare_exchange_strong(&communicator->fate, &fate, DRAINING)) {
    const bool under_way = fate == DRAINING || fate == ENDING;
    *code = under_way ? SGLANG_FL_FLAGCX_ENDING_NOW : SGLANG_FL_FLAGCX_ALREADY_ENDED;
    return NULL;
  }
  sglang_fl_flagcx_job *job = job_new(communicator->library, work);
  *code = SGLANG_FL_FLAGCX_OUT_OF_MEMORY;
  if (job != NULL) {
    job->communicator = communicator;
    job->drain_s = drain_s;
    job = job_start(job, code);
  }
  if (job == NULL) atomic_store(&communicator->fate, LIVE);
  return job;
}

sglang_fl_flagcx_job *sglang_fl_flagcx_start_destroy(sglang_fl_flagcx_communicator *communicator,
                                                     double drain_s, int32_t *code) {
  *code = SGLANG_FL_FLAGCX_NULL_HANDLE;
  return communicator != NULL ? start_end(communicator, drain_s, work_destroy, code) : NULL;
}

static sglang_fl_flagcx_job *start_abort_by(sglang_fl_flagcx_communicator *communicator, double drain_s,
                                            void (*work)(sglang_fl_flagcx_job *), int32_t *code) {
  *code = SGLANG_FL_FLAGCX_NULL_HANDLE;
  if (communicator == NULL) return NULL;
  *code = SGLANG_FL_FLAGCX_MISSING_SYMBOL;
  if (!communicator->library->present.flagcxCommAbort) return NULL;
  atomic_store(&communicator->abort_tried, true);
  atomic_store(&communicator->gate.shut, true);
  return start_end(communicator, drain_s, work, code);
}

sglang_fl_flagcx_job *sglang_fl_flagcx_start_abort(sglang_fl_flagcx_communicator *communicator, double drain_s,
                                                   int32_t *code) {
  return start_abort_by(communicator, drain_s, work_abort, code);
}

sglang_fl_flagcx_job *sglang_fl_flagcx_start_interrupt(sglang_fl_flagcx_communicator *communicator,
                                                       double drain_s, int32_t *code) {
  return start_abort_by(communicator, drain_s, work_interrupt, code);
}

/* waiting */

int32_t sglang_fl_flagcx_job_wait(sglang_fl_flagcx_job *job, double seconds) {
  struct timespec limit;
  if (job == NULL) return 0;
  clock_gettime(CLOCK_MONOTONIC, &limit);
  const double whole = floor(seconds);
  limit.tv_sec += (time_t)whole;
  limit.tv_nsec += (long)((seconds - whole) * 1e9);
  if (limit.tv_nsec >= 1000000000) {
    limit.tv_sec += 1;
    limit.tv_nsec -= 1000000000;
  }
  pthread_mutex_lock(&job->lock);
  while (!job->done && pthread_cond_timedwait(&job->finished, &job->lock, &limit) == 0) continue;
  bool done = job->done;
  pthread_mutex_unlock(&job->lock);
  return done;
}

/* The four below answer only about a job that job_wait has called done. */

int32_t sglang_fl_flagcx_job_result(sglang_fl_flagcx_job *job) {
  return job != NULL ? job->result : SGLANG_FL_FLAGCX_NULL_HANDLE;
}

void sglang_fl_flagcx_job_message(sglang_fl_flagcx_job *job, char *message, size_t message_bytes) {
  if (message_bytes > 0) snprintf(message, message_bytes, "%s", job != NULL ? job->message : "");
}

size_t sglang_fl_flagcx_job_unique_id(sglang_fl_flagcx_job *job, uint8_t *unique_id, size_t unique_id_bytes) {
  if (job == NULL || unique_id_bytes < job->unique_id_bytes) return 0;
  memcpy(unique_id, job->unique_id, job->unique_id_bytes);
  return job->unique_id_bytes;
}

sglang_fl_flagcx_communicator *sglang_fl_flagcx_job_communicator(sglang_fl_flagcx_job *job) {
  if (job == NULL || job->result != 0) return NULL;
  pthread_mutex_lock(&job->lock);
  job->taken = true;
  pthread_cond_signal(&job->claimed);
  pthread_mutex_unlock(&job->lock);
  return job->communicator;
}

/* Nobody waits any more for an end that is still in the library: later ones need not wait for it either. */
static void give_up_end(sglang_fl_flagcx_job *job) {
  int ending = ENDING;
  atomic_compare_exchange_strong(&job->communicator->fate, &ending, GIVEN_UP);
}

void sglang_fl_flagcx_job_release(sglang_fl_flagcx_job *job) {
  if (job == NULL) return;
  pthread_mutex_lock(&job->lock);
  const bool ends = job->work == work_destroy || job->work == work_abort || job->work == work_interrupt;
  if (!job->done && ends) give_up_end(job);
  job->released = true;
  pthread_cond_signal(&job->claimed);
  pthread_mutex_unlock(&job->lock);
  job_drop(job);
}
