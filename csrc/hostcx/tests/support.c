/* Ranks as processes or threads, checks that count, and values to send. */
#include "support.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_FAILURES_SHOWN = 20, CASE_SECONDS = 60, SLOW_CASE_SECONDS = 120 };

struct record *record;
enum mode mode;
bool is_slow;

/* The calls that were made before this process was forked. */
static uint64_t calls_before[MOST_FUNCTIONS];

/* For the signal handler, which may not format: ready words. */
static char standing[256];
static const char *walk_name = "start";

static void fail_for_time(int signal_number)
{
    (void)signal_number;
    if (write(STDERR_FILENO, standing, strlen(standing)) < 0)
        _exit(3);
    _exit(2);
}

static const char *case_variant;

void name_next_case(const char *variant) { case_variant = variant; }

static void begin_case(const char *name, const char *variant)
{
    unsigned seconds = is_slow ? SLOW_CASE_SECONDS : CASE_SECONDS;
    alarm(0);
    snprintf(standing, sizeof standing, "driver: no end after %u s: walk %s, case %s%s%s\n", seconds, walk_name, name,
             variant != NULL ? ", " : "", variant != NULL ? variant : "");
    alarm(seconds);
}

void begin_walk(const char *name)
{
    walk_name = name;
    begin_case("start", NULL);
}

void support_begin(enum mode chosen)
{
    signal(SIGALRM, fail_for_time);
    begin_case("start", NULL);
    mode = chosen;
    record = mmap(NULL, sizeof *record, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (record == MAP_FAILED)
        abort();
}

void check_that(bool holds, const char *file, int line, const char *format, ...)
{
    atomic_fetch_add(&record->checks, 1);
    if (holds)
        return;
    if (atomic_fetch_add(&record->failures, 1) >= MOST_FAILURES_SHOWN)
        return;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s:%d: %s\n", file, line, text);
}

double now_seconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

void expect_async_error(struct rank *r, flagcxResult_t wanted, const char *words)
{
    flagcxResult_t error = flagcxSuccess;
    float value = 1;
    OK(flagcxCommGetAsyncError(r->comm, &error));
    CHECK_SAYING(error == wanted, "the async error is %d, not %d", (int)error, (int)wanted);
    /* It stays, and every further call answers with it. */
    CHECK_RESULT(flagcxAllReduce(&value, &value, 1, flagcxFloat32, flagcxSum, r->comm, r->stream), wanted);
    CHECK_RESULT(flagcxSend(&value, 1, flagcxFloat32, 0, r->comm, r->stream), wanted);
    CHECK_SAYING(strstr(flagcxGetLastError(r->comm), words) != NULL, "\"%s\" does not say \"%s\"",
                 flagcxGetLastError(r->comm), words);
}

static void remember_calls(void)
{
    for (int i = 0; hostcxCallName(i) != NULL; i++)
        calls_before[i] = hostcxCallCountOf(hostcxCallName(i));
}

void add_calls(void)
{
    for (int i = 0; hostcxCallName(i) != NULL; i++)
        atomic_fetch_add(&record->calls[i], hostcxCallCountOf(hostcxCallName(i)) - calls_before[i]);
    remember_calls();
}

flagcxStream_t new_stream(void)
{
    flagcxDeviceHandle_t device = NULL;
    flagcxStream_t stream = NULL;
    OK(flagcxDeviceHandleInit(&device));
    OK(device->streamCopy(&stream, NULL));
    OK(flagcxDeviceHandleFree(device));
    return stream;
}

void free_stream(flagcxStream_t stream)
{
    flagcxDeviceHandle_t device = NULL;
    OK(flagcxDeviceHandleInit(&device));
    OK(device->streamFree(stream));
    OK(flagcxDeviceHandleFree(device));
}

pid_t start_process(const struct rank *rank, rank_body body)
{
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    struct rank mine = *rank;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    remember_calls();
    mine.stream = new_stream();
    body(&mine);
    free_stream(mine.stream);
    add_calls();
    /* exit, not _exit: leaks are looked for there. */
    exit(0);
}

int end_process(pid_t pid)
{
    int status = -1;
    waitpid(pid, &status, 0);
    return status;
}

struct thread {
    pthread_t thread;
    struct rank rank;
    rank_body body;
};

static void *thread_main(void *argument)
{
    struct thread *thread = argument;
    thread->rank.stream = new_stream();
    thread->body(&thread->rank);
    free_stream(thread->rank.stream);
    return NULL;
}

static void run_threads(const struct rank *model, rank_body body)
{
    struct thread threads[MOST_RANKS];
    for (int i = 0; i < model->nranks; i++) {
        threads[i].rank = *model;
        threads[i].rank.rank = i;
        threads[i].body = body;
        CHECK(pthread_create(&threads[i].thread, NULL, thread_main, &threads[i]) == 0);
    }
    for (int i = 0; i < model->nranks; i++)
        pthread_join(threads[i].thread, NULL);
}

void run_ranks_bare_as(const char *name, int nranks, rank_body body, const void *argument)
{
    begin_case(name, case_variant);
    case_variant = NULL;
    struct rank model = {.nranks = nranks, .argument = argument};
    pid_t processes[MOST_RANKS];
    OK(flagcxGetUniqueId(&model.id));
    if (mode == AS_THREADS) {
        run_threads(&model, body);
        return;
    }
    for (int i = 0; i < nranks; i++) {
        model.rank = i;
        processes[i] = start_process(&model, body);
    }
    for (int i = 0; i < nranks; i++) {
        int status = end_process(processes[i]);
        CHECK_SAYING(status == 0, "rank %d of %d ended with status %#x", i, nranks, status);
    }
}

struct body_with_communicator {
    rank_body body;
    const void *argument;
};

static void run_with_communicator(struct rank *rank)
{
    const struct body_with_communicator *inner = rank->argument;
    OK(flagcxCommInitRank(&rank->comm, rank->nranks, &rank->id, rank->rank));
    if (rank->comm == NULL)
        return;
    rank->argument = inner->argument;
    inner->body(rank);
    OK(flagcxCommDestroy(rank->comm));
}

void run_ranks_as(const char *name, int nranks, rank_body body, const void *argument)
{
    struct body_with_communicator inner = {body, argument};
    run_ranks_bare_as(name, nranks, run_with_communicator, &inner);
}

static bool is_unsigned(flagcxDataType_t datatype)
{
    return datatype == flagcxUint8 || datatype == flagcxUint32 || datatype == flagcxUint64;
}

int value_at(int rank, size_t index, flagcxDataType_t datatype)
{
    int value = (int)((index * 7 + (size_t)rank * 5 + 3) % 6);
    return is_unsigned(datatype) ? value : value - 2;
}

static uint16_t half_of_small_integer(int value)
{
    int exponent;
    if (value == 0)
        return 0;
    double fraction = frexp(value < 0 ? -value : value, &exponent);
    unsigned bits = (unsigned)(exponent + 14) << 10 | ((unsigned)(fraction * 2048) & 0x3ffu);
    return (uint16_t)(bits | (value < 0 ? 0x8000u : 0));
}

static double number_of_half(uint16_t half)
{
    int exponent = half >> 10 & 31;
    double fraction = half & 0x3ff;
    double magnitude = exponent == 31  ? (fraction == 0 ? (double)INFINITY : (double)NAN)
                       : exponent == 0 ? ldexp(fraction, -24)
                                       : ldexp(1024 + fraction, exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

void store(void *buffer, size_t index, flagcxDataType_t datatype, int value)
{
    float number = (float)value;
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    switch (datatype) {
    case flagcxInt8: ((int8_t *)buffer)[index] = (int8_t)value; break;
    case flagcxUint8: ((uint8_t *)buffer)[index] = (uint8_t)value; break;
    case flagcxInt32: ((int32_t *)buffer)[index] = value; break;
    case flagcxUint32: ((uint32_t *)buffer)[index] = (uint32_t)value; break;
    case flagcxInt64: ((int64_t *)buffer)[index] = value; break;
    case flagcxUint64: ((uint64_t *)buffer)[index] = (uint64_t)value; break;
    case flagcxFloat16: ((uint16_t *)buffer)[index] = half_of_small_integer(value); break;
    case flagcxFloat32: ((float *)buffer)[index] = number; break;
    case flagcxFloat64: ((double *)buffer)[index] = value; break;
    case flagcxBfloat16: ((uint16_t *)buffer)[index] = (uint16_t)(bits >> 16); break;
    default: abort();
    }
}

double load(const void *buffer, size_t index, flagcxDataType_t datatype)
{
    uint32_t bits;
    float number;
    switch (datatype) {
    case flagcxInt8: return ((const int8_t *)buffer)[index];
    case flagcxUint8: return ((const uint8_t *)buffer)[index];
    case flagcxInt32: return ((const int32_t *)buffer)[index];
    case flagcxUint32: return ((const uint32_t *)buffer)[index];
    case flagcxInt64: return (double)((const int64_t *)buffer)[index];
    case flagcxUint64: return (double)((const uint64_t *)buffer)[index];
    case flagcxFloat16: return number_of_half(((const uint16_t *)buffer)[index]);
    case flagcxFloat32: return (double)((const float *)buffer)[index];
    case flagcxFloat64: return ((const double *)buffer)[index];
    case flagcxBfloat16:
        bits = (uint32_t)((const uint16_t *)buffer)[index] << 16;
        memcpy(&number, &bits, sizeof number);
        return (double)number;
    default: abort();
    }
}

void *new_buffer(size_t count, flagcxDataType_t datatype)
{
    size_t bytes = count * getFlagcxDataTypeSize(datatype);
    void *buffer = malloc(bytes);
    if (bytes > 0)
        memset(buffer, 0x5b, bytes);
    return buffer;
}

void *new_values(int rank, size_t start, size_t count, flagcxDataType_t datatype)
{
    void *buffer = new_buffer(count, datatype);
    for (size_t i = 0; i < count; i++)
        store(buffer, i, datatype, value_at(rank, start + i, datatype));
    return buffer;
}
