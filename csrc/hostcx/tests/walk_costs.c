/* What a large message and a long wait cost. Only true without a sanitizer. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "support.h"
#include "walks.h"

enum { MESSAGE_MEBIBYTES = 256, EXTRA_MEBIBYTES = 64, WAIT_SECONDS = 2, WAIT_MILLISECONDS_OF_CPU = 50, EXTRA_KIB = 2 };

static long peak_kibibytes(void)
{
    char line[256];
    long kibibytes = -1;
    FILE *file = fopen("/proc/self/status", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "VmHWM: %ld kB", &kibibytes) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return kibibytes;
}

/* The peak of a rank counts the shared pages that it touched too. */
static void large_message(struct rank *r)
{
    size_t bytes = (size_t)MESSAGE_MEBIBYTES << 20, count = bytes / sizeof(float);
    float *values = malloc(bytes);
    bool right = true;
    for (size_t i = 0; i < count; i++)
        values[i] = (float)(r->rank + 1);
    long before = peak_kibibytes();
    OK(flagcxAllReduce(values, values, count, flagcxFloat32, flagcxSum, r->comm, r->stream));
    atomic_fetch_add(&record->numbers[EXTRA_KIB], (uint64_t)(peak_kibibytes() - before));
    for (size_t i = 0; i < count; i += 1001)
        right = right && values[i] == (float)(r->nranks * (r->nranks + 1) / 2);
    CHECK(right);
    free(values);
}

static double cpu_seconds(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

/* Rank 0 comes late to everything; the others wait, in a collective, in a receive and in a full send. */
static void wait_long(struct rank *r)
{
    enum { MORE_THAN_A_RING = 1 << 20 };
    char *bytes = calloc(1, MORE_THAN_A_RING), one = 1;
    for (int round = 0; round < 3; round++) {
        OK(flagcxBarrier(r->comm, r->stream));
        if (r->rank == 0)
            sleep(WAIT_SECONDS);
        double before = cpu_seconds();
        if (round == 0)
            OK(flagcxAllReduce(&one, &one, 1, flagcxInt8, flagcxMax, r->comm, r->stream));
        if (round == 1 && r->rank == 0)
            OK(flagcxSend(bytes, MORE_THAN_A_RING, flagcxInt8, 1, r->comm, r->stream));
        if (round == 1 && r->rank == 1)
            OK(flagcxRecv(bytes, MORE_THAN_A_RING, flagcxInt8, 0, r->comm, r->stream));
        if (round == 2 && r->rank == 0)
            OK(flagcxRecv(bytes, MORE_THAN_A_RING, flagcxInt8, 1, r->comm, r->stream));
        if (round == 2 && r->rank == 1)
            OK(flagcxSend(bytes, MORE_THAN_A_RING, flagcxInt8, 0, r->comm, r->stream));
        double used = (cpu_seconds() - before) * 1e3;
        CHECK_SAYING(used < WAIT_MILLISECONDS_OF_CPU, "rank %d used %.1f ms of processor time in wait %d", r->rank, used,
                     round);
        if (r->rank == 1)
            printf("[wait %d: %.2f ms of CPU] ", round, used);
    }
    fflush(stdout);
    free(bytes);
}

void walk_costs(int nranks)
{
    atomic_store(&record->numbers[EXTRA_KIB], 0);
    if (mode == AS_PROCESSES)
        run_ranks(nranks, large_message, NULL);
    double extra = (double)atomic_load(&record->numbers[EXTRA_KIB]) / 1024;
    printf("[%d MiB: %.1f MiB more in all ranks] ", MESSAGE_MEBIBYTES, extra);
    CHECK_SAYING(extra < EXTRA_MEBIBYTES, "a message of %d MiB took %.1f MiB more", MESSAGE_MEBIBYTES, extra);
    fflush(stdout);
    if (mode == AS_PROCESSES)
        run_ranks(nranks, wait_long, NULL);
}
