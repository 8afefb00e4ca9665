/* Walks every function of hostcx, every type and operation, at a number of ranks, and says how often it
 * called each function. Fails if a check failed or a function was not called.
 *
 *   driver processes|threads RANKS [plain|slow|planted]
 *
 * plain adds what is only true without a sanitizer: memory and processor time. slow walks large counts with
 * fewer types. planted makes one call.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"
#include "walks.h"

enum { COLUMNS = 3 };

static int print_calls(void)
{
    int never = 0, column = 0;
    uint64_t total = 0;
    for (int i = 0; hostcxCallName(i) != NULL; i++) {
        uint64_t calls = atomic_load(&record->calls[i]);
        total += calls;
        never += calls == 0;
        printf("%-32s %8llu%s", hostcxCallName(i), (unsigned long long)calls, ++column % COLUMNS == 0 ? "\n" : "   ");
    }
    printf("%s%llu calls, %llu checks, %llu failed\n", column % COLUMNS == 0 ? "" : "\n", (unsigned long long)total,
           (unsigned long long)atomic_load(&record->checks), (unsigned long long)atomic_load(&record->failures));
    if (never > 0)
        fprintf(stderr, "driver: %d functions were never called, see the table\n", never);
    return never;
}

static void say(const char *subject)
{
    static double last;
    double now = now_seconds();
    if (last > 0)
        printf("  %.1f s\n", now - last);
    last = now;
    if (subject != NULL) {
        printf("%-14s", subject);
        begin_walk(subject);
    }
    fflush(stdout);
}

static void walk_everything(int nranks, bool plain)
{
    say("arithmetic");
    walk_arithmetic();
    say("interface");
    walk_interface(nranks);
    say("joining");
    walk_joining(nranks);
    say("collectives");
    walk_collectives(nranks);
    say("groups");
    walk_groups(nranks);
    say("failures");
    walk_failures(nranks);
    say("disagreement");
    walk_disagreement(nranks);
    if (mode == AS_PROCESSES) {
        say("deaths");
        walk_deaths(nranks);
    }
    if (plain) {
        say("costs");
        walk_costs(nranks);
    }
    say(NULL);
}

static int usage(void)
{
    fprintf(stderr, "usage: driver processes|threads RANKS [plain|slow|planted]\n");
    return 2;
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return usage();
    int nranks = atoi(argv[2]);
    const char *extra = argc > 3 ? argv[3] : "";
    /* One test starts a rank more. */
    if (nranks < 2 || nranks > MOST_RANKS - 1)
        return usage();
    if (strcmp(argv[1], "processes") != 0 && strcmp(argv[1], "threads") != 0)
        return usage();
    is_slow = strcmp(extra, "slow") == 0;
    support_begin(strcmp(argv[1], "threads") == 0 ? AS_THREADS : AS_PROCESSES);
    if (strcmp(extra, "planted") == 0) {
        walk_planted(nranks);
        return atomic_load(&record->failures) != 0;
    }
    walk_everything(nranks, strcmp(extra, "plain") == 0);
    add_calls();
    int never = print_calls();
    return atomic_load(&record->failures) != 0 || never != 0;
}
