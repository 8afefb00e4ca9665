/* Who a process is, on which machine, and whether it still lives. */
#ifndef HOSTCX_IDENTITY_H
#define HOSTCX_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { BOOT_ID_BYTES = 36, HOST_NAME_BYTES = 64 };

/* Where process numbers mean the same: one boot of one kernel and one pid namespace. */
struct machine {
    char boot_id[BOOT_ID_BYTES];
    uint64_t pid_namespace;
    char host_name[HOST_NAME_BYTES];
};

/* A process to keep an eye on. descriptor is a pidfd, or -1 where the kernel has none. */
struct watch {
    pid_t pid;
    uint64_t start_time;
    int descriptor;
};

/* Fills in this process's machine; false (errno set) if /proc cannot be read. */
bool machine_of_this_process(struct machine *machine);

/* Clock ticks from boot to the start of the process; 0 if there is no such process. */
uint64_t start_time_of(pid_t pid);

/* Starts watching. start_time 0: not known yet. A process that is gone already is watched as gone. */
void watch_open(struct watch *watch, pid_t pid, uint64_t start_time);

bool watch_gone(const struct watch *watch);

void watch_close(struct watch *watch);

#endif
