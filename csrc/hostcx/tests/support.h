/* What the walks share: ranks as processes or threads, checks that count, and values to send. */
#ifndef HOSTCX_TESTS_SUPPORT_H
#define HOSTCX_TESTS_SUPPORT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "hostcx.h"

enum { MOST_RANKS = 9, MOST_FUNCTIONS = 128 };

enum mode { AS_PROCESSES, AS_THREADS };

/* One rank at work. comm is NULL where a test makes its own. */
struct rank {
    int rank;
    int nranks;
    flagcxUniqueId id;
    flagcxComm_t comm;
    flagcxStream_t stream;
    const void *argument;
};

typedef void (*rank_body)(struct rank *rank);

/* Counted in memory that all processes of the driver share. */
struct record {
    _Atomic uint64_t failures;
    _Atomic uint64_t checks;
    _Atomic uint64_t calls[MOST_FUNCTIONS];
    /* For tests to pass numbers and an id between processes. */
    _Atomic uint64_t numbers[16];
    flagcxUniqueId id;
};

extern struct record *record;
extern enum mode mode;
/* A tool makes everything slow: large counts with fewer types. */
extern bool is_slow;

void support_begin(enum mode chosen);

/* What the driver does from here on: if it lasts too long, the driver says so by these names and fails. */
void begin_walk(const char *name);
void name_next_case(const char *variant);

/* Runs the body on every rank, each with a communicator, and waits for all: one case. */
void run_ranks_as(const char *name, int nranks, rank_body body, const void *argument);

/* The same without communicators: the body makes its own from rank->id. */
void run_ranks_bare_as(const char *name, int nranks, rank_body body, const void *argument);

#define run_ranks(nranks, body, argument) run_ranks_as(#body, nranks, body, argument)
#define run_ranks_bare(nranks, body, argument) run_ranks_bare_as(#body, nranks, body, argument)

/* Starts one process for the body and returns its number; only where ranks are processes. */
pid_t start_process(const struct rank *rank, rank_body body);

/* Waits for the process; its exit status as from waitpid. */
int end_process(pid_t pid);

flagcxStream_t new_stream(void);
void free_stream(flagcxStream_t stream);

/* Seconds since some fixed time. */
double now_seconds(void);

/* Adds up the calls that this process made since it began. */
void add_calls(void);

void check_that(bool holds, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));

/* The communicator has failed: with this code, in these words, and for good. */
void expect_async_error(struct rank *r, flagcxResult_t wanted, const char *words);

#define CHECK(holds) check_that((holds), __FILE__, __LINE__, "%s", #holds)
#define CHECK_SAYING(holds, ...) check_that((holds), __FILE__, __LINE__, __VA_ARGS__)
#define CHECK_RESULT(call, wanted)                                                                           \
    do {                                                                                                     \
        flagcxResult_t found_ = (call);                                                                      \
        if (found_ == (wanted))                                                                              \
            check_that(true, __FILE__, __LINE__, "%s", #call);                                               \
        else                                                                                                 \
            check_that(false, __FILE__, __LINE__, "%s gave %d, not %d: %s", #call, (int)found_, (int)(wanted), \
                       flagcxGetLastError(NULL));                                                            \
    } while (0)
#define OK(call) CHECK_RESULT(call, flagcxSuccess)

/* A small number that depends on the rank and the place, and is exact in every type. */
int value_at(int rank, size_t index, flagcxDataType_t datatype);

void store(void *buffer, size_t index, flagcxDataType_t datatype, int value);
double load(const void *buffer, size_t index, flagcxDataType_t datatype);

/* count elements of a rank, whose first one stands at index start; exactly as large as that. */
void *new_values(int rank, size_t start, size_t count, flagcxDataType_t datatype);

/* Memory of exactly count elements, filled with a byte that no value has. */
void *new_buffer(size_t count, flagcxDataType_t datatype);

#endif
