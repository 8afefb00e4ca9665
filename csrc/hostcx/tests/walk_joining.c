/* How ranks meet: ids that are none, ranks that contradict each other, ids that are used twice. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "segment.h"
#include "support.h"
#include "walks.h"

/* Where an id keeps the boot of its machine, the pid namespace, and the check sum over all before it. */
enum { BOOT_ID_AT = 32, PID_NAMESPACE_AT = 72, CHECKED_BYTES = 240 };

static void seal(flagcxUniqueId *id)
{
    uint64_t sum = 14695981039346656037u;
    for (int i = 0; i < CHECKED_BYTES; i++)
        sum = (sum ^ (unsigned char)id->internal[i]) * 1099511628211u;
    memcpy(id->internal + CHECKED_BYTES, &sum, sizeof sum);
}

static void expect_refusal(flagcxUniqueId *id, flagcxResult_t wanted, const char *words)
{
    flagcxComm_t comm = NULL;
    CHECK_RESULT(flagcxCommInitRank(&comm, 2, id, 0), wanted);
    CHECK(comm == NULL);
    CHECK_SAYING(strstr(flagcxGetLastError(NULL), words) != NULL, "\"%s\" does not say \"%s\"",
                 flagcxGetLastError(NULL), words);
}

static void wrong_ids(void)
{
    flagcxUniqueId good, bad;
    OK(flagcxGetUniqueId(&good));
    memset(&bad, 0, sizeof bad);
    expect_refusal(&bad, flagcxInvalidArgument, "no unique id");
    memset(&bad, 0xff, sizeof bad);
    expect_refusal(&bad, flagcxInvalidArgument, "no unique id");
    /* As if the id had been copied as a string, or one byte had been lost. */
    for (int at = 8; at < CHECKED_BYTES + 8; at += 29) {
        bad = good;
        bad.internal[at] = (char)(bad.internal[at] ^ 0x20);
        expect_refusal(&bad, flagcxInvalidArgument, at < 12 ? "format" : "damaged");
    }
    bad = good;
    bad.internal[BOOT_ID_AT] ^= 1;
    seal(&bad);
    expect_refusal(&bad, flagcxInvalidUsage, "another machine");
    bad = good;
    bad.internal[PID_NAMESPACE_AT] ^= 1;
    seal(&bad);
    expect_refusal(&bad, flagcxInvalidUsage, "another container");
    /* The descriptor of something else. */
    bad = good;
    memset(bad.internal + 16, 0, 4);
    seal(&bad);
    expect_refusal(&bad, flagcxRemoteError, "leads nowhere");
    CHECK_RESULT(flagcxGetUniqueId(NULL), flagcxInvalidArgument);
}

static void wrong_numbers(void)
{
    flagcxUniqueId id;
    flagcxComm_t comm = NULL;
    OK(flagcxGetUniqueId(&id));
    CHECK_RESULT(flagcxCommInitRank(&comm, 0, &id, 0), flagcxInvalidArgument);
    CHECK_RESULT(flagcxCommInitRank(&comm, 2, &id, 2), flagcxInvalidArgument);
    CHECK_RESULT(flagcxCommInitRank(&comm, 2, &id, -1), flagcxInvalidArgument);
    CHECK_RESULT(flagcxCommInitRank(&comm, 257, &id, 0), flagcxInvalidArgument);
    CHECK_RESULT(flagcxCommInitRank(NULL, 2, &id, 0), flagcxInvalidArgument);
    CHECK_RESULT(flagcxCommInitRank(&comm, 2, NULL, 0), flagcxInvalidArgument);
    /* The id is still good. */
    OK(flagcxCommInitRank(&comm, 1, &id, 0));
    OK(flagcxCommDestroy(comm));
    expect_refusal(&id, flagcxRemoteError, "leads nowhere");
}

static void join_late(struct rank *r)
{
    flagcxComm_t comm = NULL;
    /* Different moments, different orders. */
    usleep((useconds_t)(1000 * ((r->rank * 7 + 3) % 5)));
    OK(flagcxCommInitRank(&comm, r->nranks, &r->id, r->rank));
    OK(flagcxCommDestroy(comm));
}

static void wait_until_taken(struct rank *r, int rank)
{
    struct invitation invitation;
    struct segment *segment = NULL;
    OK(invitation_read(&r->id, &invitation));
    OK(segment_open(&invitation, r->nranks, &segment));
    while (segment != NULL && atomic_load(&segment->slots[rank].state) == RANK_ABSENT)
        usleep(1000);
    if (segment != NULL)
        segment_release(segment);
}

/* Rank 0 has come; the last rank first says wrong things, which must not disturb the others. */
static void contradict(struct rank *r)
{
    flagcxComm_t comm = NULL;
    if (r->rank == r->nranks - 1) {
        wait_until_taken(r, 0);
        CHECK_RESULT(flagcxCommInitRank(&comm, r->nranks, &r->id, 0), flagcxInvalidUsage);
        CHECK(strstr(flagcxGetLastError(NULL), "has been taken") != NULL);
        CHECK_RESULT(flagcxCommInitRank(&comm, r->nranks + 1, &r->id, 1), flagcxInvalidArgument);
        CHECK(strstr(flagcxGetLastError(NULL), "nranks") != NULL);
    }
    join_late(r);
}

void walk_joining(int nranks)
{
    wrong_ids();
    wrong_numbers();
    for (int round = 0; round < 10; round++)
        run_ranks_bare(nranks, join_late, NULL);
    run_ranks_bare(nranks, contradict, NULL);
}
