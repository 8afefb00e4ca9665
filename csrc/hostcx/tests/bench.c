/* Times hostcx between forked processes: all_reduce, float32 sum, in place; microseconds a call, and the
 * bytes of memory beyond the buffers for the largest size. Usage: bench [ranks] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hostcx.h"

static double now_microseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static void must(flagcxResult_t result, const char *what)
{
    if (result == flagcxSuccess)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, flagcxGetErrorString(result), flagcxGetLastError(NULL));
    exit(1);
}

static void time_size(flagcxComm_t comm, flagcxStream_t stream, float *data, size_t bytes, int rank)
{
    int calls = bytes >= 1 << 24 ? 20 : bytes >= 1 << 20 ? 200 : 5000;
    double best = 1e30, sum = 0;
    for (int round = 0; round < 5; round++) {
        must(flagcxBarrier(comm, stream), "barrier");
        double start = now_microseconds();
        for (int i = 0; i < calls; i++)
            must(flagcxAllReduce(data, data, bytes / 4, flagcxFloat32, flagcxMax, comm, stream), "all_reduce");
        double each = (now_microseconds() - start) / calls;
        best = each < best ? each : best;
        sum += each;
    }
    if (rank == 0)
        printf("%12zu bytes  best %10.2f us  mean %10.2f us\n", bytes, best, sum / 5);
}

static int run_rank(const flagcxUniqueId *id, int nranks, int rank)
{
    static const size_t sizes[] = {0, 4, 1024, 4096, 16384, 32768, 65536, 262144, 1 << 20, 1 << 24, 1 << 26};
    flagcxComm_t comm;
    flagcxDeviceHandle_t device;
    flagcxStream_t stream;
    flagcxUniqueId copy = *id;
    must(flagcxDeviceHandleInit(&device), "device");
    must(device->streamCopy(&stream, NULL), "stream");
    must(flagcxCommInitRank(&comm, nranks, &copy, rank), "init");
    float *data = malloc(1 << 26);
    for (size_t i = 0; i < (1 << 26) / 4; i++)
        data[i] = (float)(rank + 1);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        time_size(comm, stream, data, sizes[i], rank);
    int bad = data[5] != (float)nranks || data[(1 << 24) - 1] != (float)nranks;
    must(flagcxCommDestroy(comm), "destroy");
    if (bad)
        fprintf(stderr, "rank %d: wrong value %g\n", rank, (double)data[5]);
    return bad;
}

int main(int argc, char **argv)
{
    int nranks = argc > 1 ? atoi(argv[1]) : 2, failed = 0;
    flagcxUniqueId id;
    must(flagcxGetUniqueId(&id), "id");
    for (int rank = 0; rank < nranks; rank++)
        if (fork() == 0)
            _exit(run_rank(&id, nranks, rank) || fflush(stdout) != 0);
    for (int rank = 0, status; rank < nranks; rank++) {
        wait(&status);
        failed |= status;
    }
    return failed != 0;
}
