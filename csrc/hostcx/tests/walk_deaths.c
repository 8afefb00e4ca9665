/* Killed processes: in the middle of a collective, while joining, all at once; forks and other users. */
#include <dirent.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"
#include "walks.h"

/* The contract is five seconds; the driver also runs in valgrind on a busy machine. */
enum { SECONDS_TO_NOTICE = 5, NOBODY = 65534, STARTED = 0, JOINING = 1 };

static void begin(int nranks, struct rank *model)
{
    memset(model, 0, sizeof *model);
    model->nranks = nranks;
    OK(flagcxGetUniqueId(&model->id));
    atomic_store(&record->numbers[STARTED], 0);
    atomic_store(&record->numbers[JOINING], 0);
}

static void wait_for_number(int number, uint64_t least)
{
    while (atomic_load(&record->numbers[number]) < least)
        usleep(1000);
}

static void start_all(const struct rank *model, rank_body body, pid_t *processes)
{
    for (int rank = 0; rank < model->nranks; rank++) {
        struct rank mine = *model;
        mine.rank = rank;
        processes[rank] = start_process(&mine, body);
    }
}

/* A killed process ends by the signal; the others must have ended by themselves, in time. */
static void end_all(const pid_t *processes, int nranks, int killed)
{
    double start = now_seconds();
    for (int rank = 0; rank < nranks; rank++) {
        int status = end_process(processes[rank]);
        if (rank == killed)
            CHECK(WIFSIGNALED(status));
        else
            CHECK_SAYING(status == 0, "rank %d ended with status %#x", rank, status);
    }
    CHECK_SAYING(now_seconds() - start < SECONDS_TO_NOTICE, "the survivors took %.1f s", now_seconds() - start);
}

/* All-reduces until there is an error. */
static void reduce_until_error(struct rank *r)
{
    enum { COUNT = 150000 };
    float *values = calloc(COUNT, sizeof *values);
    flagcxResult_t result = flagcxSuccess, error = flagcxSuccess;
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    while (result == flagcxSuccess) {
        atomic_fetch_add(&record->numbers[STARTED], 1);
        result = flagcxAllReduce(values, values, COUNT, flagcxFloat32, flagcxSum, r->comm, r->stream);
    }
    CHECK_SAYING(result == flagcxRemoteError, "the killed rank gave %d: %s", (int)result, flagcxGetLastError(r->comm));
    OK(flagcxCommGetAsyncError(r->comm, &error));
    CHECK(error == flagcxRemoteError);
    CHECK(strstr(flagcxGetLastError(r->comm), "rank") != NULL);
    OK(flagcxCommDestroy(r->comm));
    free(values);
}

static void kill_in_all_reduce(int nranks)
{
    struct rank model;
    pid_t processes[MOST_RANKS];
    begin(nranks, &model);
    start_all(&model, reduce_until_error, processes);
    wait_for_number(STARTED, (uint64_t)nranks * 5);
    kill(processes[nranks - 1], SIGKILL);
    end_all(processes, nranks, nranks - 1);
}

/* Only asks for the async error: nothing is in flight when the other dies. */
static void ask_until_error(struct rank *r)
{
    flagcxResult_t error = flagcxSuccess;
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    atomic_fetch_add(&record->numbers[STARTED], 1);
    while (error == flagcxSuccess) {
        OK(flagcxCommGetAsyncError(r->comm, &error));
        usleep(10 * 1000);
    }
    CHECK(error == flagcxRemoteError);
    OK(flagcxCommDestroy(r->comm));
}

static void kill_while_idle(int nranks)
{
    struct rank model;
    pid_t processes[MOST_RANKS];
    begin(nranks, &model);
    start_all(&model, ask_until_error, processes);
    wait_for_number(STARTED, (uint64_t)nranks);
    kill(processes[0], SIGKILL);
    end_all(processes, nranks, 0);
}

/* The last rank never comes. */
static void join_incomplete(struct rank *r)
{
    atomic_fetch_add(&record->numbers[STARTED], 1);
    if (r->rank == r->nranks - 1)
        return;
    CHECK_RESULT(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank), flagcxRemoteError);
    CHECK(r->comm == NULL);
    CHECK(strstr(flagcxGetLastError(NULL), "rank 0 (process") != NULL || r->nranks > 3);
}

static void kill_while_joining(int nranks)
{
    struct rank model;
    pid_t processes[MOST_RANKS];
    begin(nranks + 1, &model);
    start_all(&model, join_incomplete, processes);
    wait_for_number(STARTED, (uint64_t)nranks + 1);
    usleep(300 * 1000);
    kill(processes[0], SIGKILL);
    end_all(processes, nranks + 1, 0);
    /* One that comes after that is not kept waiting either. */
    struct rank late = model;
    late.rank = nranks;
    flagcxComm_t comm = NULL;
    CHECK_RESULT(flagcxCommInitRank(&comm, late.nranks, &late.id, late.rank), flagcxRemoteError);
}

/* Makes the id, and lives until it is killed. */
static void make_id_and_wait(struct rank *r)
{
    (void)r;
    OK(flagcxGetUniqueId(&record->id));
    atomic_store(&record->numbers[STARTED], 1);
    pause();
}

static void join_without_creator(struct rank *r)
{
    r->id = record->id;
    atomic_store(&record->numbers[JOINING], 1);
    CHECK_RESULT(flagcxCommInitRank(&r->comm, 2, &r->id, 0), flagcxRemoteError);
    CHECK(strstr(flagcxGetLastError(NULL), "has ended") != NULL);
}

static void kill_the_creator(void)
{
    struct rank model;
    begin(2, &model);
    pid_t creator = start_process(&model, make_id_and_wait);
    wait_for_number(STARTED, 1);
    pid_t waiting = start_process(&model, join_without_creator);
    wait_for_number(JOINING, 1);
    usleep(300 * 1000);
    kill(creator, SIGKILL);
    end_process(creator);
    end_all(&waiting, 1, -1);
}

static size_t count_files(const char *folder)
{
    DIR *directory = opendir(folder);
    size_t count = 0;
    if (directory == NULL)
        return 0;
    while (readdir(directory) != NULL)
        count++;
    closedir(directory);
    return count;
}

static size_t count_own_descriptors(void) { return count_files("/proc/self/fd"); }

static void kill_all(int nranks)
{
    struct rank model;
    pid_t processes[MOST_RANKS];
    size_t files = count_files("/dev/shm"), descriptors = count_own_descriptors();
    begin(nranks, &model);
    start_all(&model, reduce_until_error, processes);
    wait_for_number(STARTED, (uint64_t)nranks * 5);
    for (int rank = 0; rank < nranks; rank++)
        kill(processes[rank], SIGKILL);
    for (int rank = 0; rank < nranks; rank++)
        CHECK(WIFSIGNALED(end_process(processes[rank])));
    CHECK(count_files("/dev/shm") <= files);
    /* This process made the id; asking for the next one lets go of what is spent. */
    begin(1, &model);
    flagcxComm_t comm = NULL;
    OK(flagcxCommInitRank(&comm, 1, &model.id, 0));
    OK(flagcxCommDestroy(comm));
    CHECK(count_own_descriptors() <= descriptors);
}

static void use_in_fork(struct rank *r)
{
    float value = 1;
    OK(flagcxCommInitRank(&r->comm, r->nranks, &r->id, r->rank));
    pid_t pid = fork();
    if (pid == 0) {
        bool refused = flagcxAllReduce(&value, &value, 1, flagcxFloat32, flagcxSum, r->comm, r->stream) ==
                           flagcxInvalidUsage &&
                       flagcxCommDestroy(r->comm) == flagcxInvalidUsage;
        _exit(refused ? 0 : 1);
    }
    CHECK(end_process(pid) == 0);
    OK(flagcxAllReduce(&value, &value, 1, flagcxFloat32, flagcxSum, r->comm, r->stream));
    CHECK(value == (float)r->nranks);
    OK(flagcxCommDestroy(r->comm));
}

static void join_as_nobody(struct rank *r)
{
    if (setuid(NOBODY) != 0)
        return;
    CHECK_RESULT(flagcxCommInitRank(&r->comm, 2, &r->id, 0), flagcxSystemError);
    CHECK(strstr(flagcxGetLastError(NULL), "one user") != NULL);
}

static void other_user(void)
{
    struct rank model;
    if (geteuid() != 0)
        return;
    begin(2, &model);
    pid_t process = start_process(&model, join_as_nobody);
    CHECK(end_process(process) == 0);
}

void walk_deaths(int nranks)
{
    kill_in_all_reduce(nranks);
    kill_while_idle(nranks);
    kill_while_joining(nranks);
    kill_the_creator();
    kill_all(nranks);
    run_ranks_bare(nranks, use_in_fork, NULL);
    other_user();
}
