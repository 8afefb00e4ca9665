/* Who a process is and whether it still lives: /proc and pidfds, with /proc alone on older kernels. */
#include "identity.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { STAT_BYTES = 1024, FIELDS_FROM_STATE_TO_START_TIME = 19 };

static ssize_t read_file(const char *path, char *text, size_t room)
{
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return -1;
    ssize_t got = read(descriptor, text, room - 1);
    close(descriptor);
    if (got >= 0)
        text[got] = '\0';
    return got;
}

bool machine_of_this_process(struct machine *machine)
{
    char boot_id[BOOT_ID_BYTES + 2];
    struct stat namespace;
    memset(machine, 0, sizeof *machine);
    if (read_file("/proc/sys/kernel/random/boot_id", boot_id, sizeof boot_id) < BOOT_ID_BYTES)
        return false;
    if (stat("/proc/self/ns/pid", &namespace) != 0)
        return false;
    memcpy(machine->boot_id, boot_id, BOOT_ID_BYTES);
    machine->pid_namespace = namespace.st_ino;
    if (gethostname(machine->host_name, sizeof machine->host_name - 1) != 0)
        strcpy(machine->host_name, "?");
    return true;
}

/* Reads state and start time; false if there is no such process. */
static bool read_stat(pid_t pid, char *state, uint64_t *start_time)
{
    char path[64], text[STAT_BYTES];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    if (read_file(path, text, sizeof text) <= 0)
        return false;
    /* The name in parentheses may itself hold spaces and parentheses. */
    char *field = strrchr(text, ')');
    if (field == NULL || field[1] != ' ')
        return false;
    field += 2;
    *state = *field;
    for (int i = 0; i < FIELDS_FROM_STATE_TO_START_TIME; i++) {
        field = strchr(field, ' ');
        if (field == NULL)
            return false;
        field++;
    }
    *start_time = strtoull(field, NULL, 10);
    return true;
}

uint64_t start_time_of(pid_t pid)
{
    char state;
    uint64_t start_time;
    return read_stat(pid, &state, &start_time) ? start_time : 0;
}

static int open_pidfd(pid_t pid)
{
#ifdef SYS_pidfd_open
    return (int)syscall(SYS_pidfd_open, pid, 0);
#else
    (void)pid;
    errno = ENOSYS;
    return -1;
#endif
}

void watch_open(struct watch *watch, pid_t pid, uint64_t start_time)
{
    *watch = (struct watch){.pid = pid, .start_time = start_time, .descriptor = -1};
    if (pid <= 0)
        return;
    watch->descriptor = open_pidfd(pid);
    /* The number may have passed to another process before the pidfd was there. */
    if (start_time != 0 && start_time_of(pid) != start_time)
        watch->pid = 0;
}

bool watch_gone(const struct watch *watch)
{
    if (watch->pid <= 0)
        return true;
    if (watch->descriptor >= 0) {
        struct pollfd poll_entry = {.fd = watch->descriptor, .events = POLLIN};
        return poll(&poll_entry, 1, 0) > 0 && (poll_entry.revents & POLLIN) != 0;
    }
    char state;
    uint64_t start_time;
    /* Unreadable is not dead: this process may just be out of descriptors. */
    if (!read_stat(watch->pid, &state, &start_time))
        return kill(watch->pid, 0) != 0 && errno == ESRCH;
    if (watch->start_time != 0 && watch->start_time != start_time)
        return true;
    return state == 'Z' || state == 'X';
}

void watch_close(struct watch *watch)
{
    if (watch->descriptor >= 0)
        close(watch->descriptor);
    watch->descriptor = -1;
}
