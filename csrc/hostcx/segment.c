/* The shared memory of one communicator: creation, sealing, mapping, and forgetting. */
#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "errors.h"
#include "identity.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

enum { PAGE = 4096, OWNER_ONLY = 0600, NEEDED_SEALS = F_SEAL_SHRINK | F_SEAL_GROW };

static const uint64_t segment_magic = 0x31676573786373a8u;
/* Pages that nobody touches cost nothing: the file is as large as the largest communicator's. */
static const size_t file_bytes = (size_t)2 << 30;
static const size_t all_rings_bytes = (size_t)1 << 30;

/* A segment that this process created and still holds open for ranks to come. */
struct creation {
    struct creation *next;
    unsigned char nonce[NONCE_BYTES];
    int descriptor;
};

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static struct creation *creations;
static struct segment *segments;
/* Mappings of the parent, which a fork does not have: kept reachable, never used. */
static struct segment *segments_of_parent;
static _Atomic unsigned generation;

static void lock_registry(void) { pthread_mutex_lock(&registry_lock); }

static void unlock_registry(void) { pthread_mutex_unlock(&registry_lock); }

static void after_fork_in_child(void)
{
    while (segments != NULL) {
        struct segment *segment = segments;
        segments = segment->next;
        segment->next = segments_of_parent;
        segments_of_parent = segment;
    }
    generation++;
    pthread_mutex_unlock(&registry_lock);
}

static void watch_forks_now(void) { pthread_atfork(lock_registry, unlock_registry, after_fork_in_child); }

static void watch_forks(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks_now);
}

unsigned fork_generation(void) { return atomic_load_explicit(&generation, memory_order_relaxed); }

static size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

static size_t ring_bytes_for(size_t nranks)
{
    size_t bytes = LARGEST_RING_BYTES;
    while (bytes * nranks * nranks > all_rings_bytes)
        bytes /= 2;
    return bytes;
}

struct layout {
    size_t slots, controls, stages, rings, total;
};

/* Where the parts lie follows from nranks alone, never from what the memory says. */
static struct layout layout_for(int nranks)
{
    size_t n = (size_t)nranks;
    struct layout layout = {.slots = round_up(sizeof(struct segment_header), PAGE)};
    layout.controls = round_up(layout.slots + n * sizeof(struct rank_slot), PAGE);
    layout.stages = round_up(layout.controls + n * n * sizeof(struct ring_control), PAGE);
    layout.rings = layout.stages + n * STAGES * STAGE_BYTES;
    layout.total = layout.rings + n * n * ring_bytes_for(n);
    return layout;
}

static int create_memory(void)
{
    /* Kernels before 6.3 do not know MFD_NOEXEC_SEAL; some after it insist on it. */
    int descriptor = memfd_create("hostcx", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (descriptor < 0 && errno == EINVAL)
        descriptor = memfd_create("hostcx", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    return descriptor;
}

static bool prepare_memory(int descriptor, const unsigned char *nonce)
{
    struct segment_header header;
    memset(&header, 0, sizeof header);
    header.magic = segment_magic;
    memcpy(header.nonce, nonce, NONCE_BYTES);
    if (fchmod(descriptor, OWNER_ONLY) != 0 || ftruncate(descriptor, (off_t)file_bytes) != 0)
        return false;
    if (pwrite(descriptor, &header, sizeof header, 0) != (ssize_t)sizeof header)
        return false;
    return fcntl(descriptor, F_ADD_SEALS, NEEDED_SEALS | F_SEAL_SEAL) == 0;
}

static bool creation_is_spent(const struct creation *creation)
{
    struct segment_header header;
    if (pread(creation->descriptor, &header, sizeof header, 0) != (ssize_t)sizeof header)
        return true;
    return header.complete != 0;
}

/* Drops the creations that match: the one with the nonce, or (NULL) all that are spent. */
static void drop_creations(const unsigned char *nonce)
{
    struct creation **link = &creations;
    while (*link != NULL) {
        struct creation *creation = *link;
        bool drop = nonce != NULL ? memcmp(creation->nonce, nonce, NONCE_BYTES) == 0 : creation_is_spent(creation);
        if (!drop) {
            link = &creation->next;
            continue;
        }
        *link = creation->next;
        close(creation->descriptor);
        free(creation);
    }
}

void segment_forget_creation(const unsigned char *nonce)
{
    lock_registry();
    drop_creations(nonce);
    unlock_registry();
}

flagcxResult_t segment_create(flagcxUniqueId *id)
{
    struct invitation invitation = {.creator = getpid(), .creator_start_time = start_time_of(getpid())};
    struct creation *creation = calloc(1, sizeof *creation);
    watch_forks();
    if (creation == NULL)
        return fail(flagcxSystemError, "flagcxGetUniqueId: out of memory");
    if (getrandom(creation->nonce, NONCE_BYTES, 0) != NONCE_BYTES) {
        free(creation);
        return fail(flagcxSystemError, "flagcxGetUniqueId: the system gave no random bytes");
    }
    creation->descriptor = create_memory();
    if (creation->descriptor < 0 || !prepare_memory(creation->descriptor, creation->nonce)) {
        int error = errno;
        if (creation->descriptor >= 0)
            close(creation->descriptor);
        free(creation);
        return fail(flagcxSystemError, "flagcxGetUniqueId: no shared memory (memfd of %zu MiB, unused pages cost "
                                       "nothing): %s",
                    file_bytes >> 20, strerror(error));
    }
    memcpy(invitation.nonce, creation->nonce, NONCE_BYTES);
    invitation.descriptor = creation->descriptor;
    lock_registry();
    drop_creations(NULL);
    creation->next = creations;
    creations = creation;
    unlock_registry();
    return invitation_write(&invitation, id);
}

static flagcxResult_t explain_open(const struct invitation *invitation, int error)
{
    if (error == EACCES || error == EPERM)
        return fail(flagcxSystemError,
                    "flagcxCommInitRank: process %d, which made the unique id, does not let this process (user %d) "
                    "open its shared memory: all ranks must run as one user, and that process must be dumpable",
                    invitation->creator, (int)geteuid());
    if (error == ENOENT || error == ESTALE)
        return fail(flagcxRemoteError,
                    "flagcxCommInitRank: the unique id of process %d leads nowhere any more: the process has ended, "
                    "the id was used for another communicator, or a rank failed while joining",
                    invitation->creator);
    return fail(flagcxSystemError, "flagcxCommInitRank: opening the shared memory of process %d: %s",
                invitation->creator, strerror(error));
}

/* Opens the creator's memfd and makes sure that it is the one the id means; -1 with errno otherwise. */
static int open_memory(const struct invitation *invitation)
{
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", invitation->creator, invitation->descriptor);
    /* The number may by now be that of a terminal or a pipe: opening must neither block nor act. */
    int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (descriptor < 0) {
        if (errno == ENXIO || errno == ENOTDIR || errno == EISDIR)
            errno = ESTALE;
        return -1;
    }
    int seals = fcntl(descriptor, F_GET_SEALS);
    bool is_segment = seals >= 0 && (seals & NEEDED_SEALS) == NEEDED_SEALS && fstat(descriptor, &status) == 0 &&
                      status.st_size == (off_t)file_bytes;
    if (!is_segment || status.st_uid != geteuid()) {
        close(descriptor);
        errno = is_segment ? EACCES : ESTALE;
        return -1;
    }
    return descriptor;
}

static bool header_matches(const struct segment *segment, const struct invitation *invitation)
{
    const struct segment_header *header = segment_header(segment);
    return header->magic == segment_magic && memcmp(header->nonce, invitation->nonce, NONCE_BYTES) == 0 &&
           atomic_load(&header->complete) == 0;
}

static flagcxResult_t map_segment(const struct invitation *invitation, int nranks, struct segment *segment)
{
    int descriptor = open_memory(invitation);
    if (descriptor < 0)
        return explain_open(invitation, errno);
    struct layout layout = layout_for(nranks);
    char *base = mmap(NULL, layout.total, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    int error = errno;
    close(descriptor);
    if (base == (char *)MAP_FAILED)
        return explain_open(invitation, error);
    segment->nranks = nranks;
    segment->bytes = layout.total;
    segment->ring_bytes = ring_bytes_for((size_t)nranks);
    segment->base = base;
    segment->slots = (struct rank_slot *)(base + layout.slots);
    segment->controls = (struct ring_control *)(base + layout.controls);
    segment->stages = base + layout.stages;
    segment->rings = base + layout.rings;
    if (!header_matches(segment, invitation)) {
        munmap(base, segment->bytes);
        return explain_open(invitation, ESTALE);
    }
    /* A fork is not a rank: it gets no part of this. */
    madvise(base, segment->bytes, MADV_DONTFORK);
    return flagcxSuccess;
}

static struct segment *find_segment(const unsigned char *nonce)
{
    struct segment *segment = segments;
    while (segment != NULL && memcmp(segment->nonce, nonce, NONCE_BYTES) != 0)
        segment = segment->next;
    return segment;
}

flagcxResult_t segment_open(const struct invitation *invitation, int nranks, struct segment **opened)
{
    flagcxResult_t result = flagcxSuccess;
    watch_forks();
    lock_registry();
    struct segment *segment = find_segment(invitation->nonce);
    if (segment != NULL && segment->nranks != nranks) {
        int others = segment->nranks;
        unlock_registry();
        return fail(flagcxInvalidArgument, "flagcxCommInitRank: this rank says nranks=%d, another rank of the same "
                                           "id said nranks=%d",
                    nranks, others);
    }
    if (segment == NULL) {
        segment = calloc(1, sizeof *segment);
        result = segment == NULL ? fail(flagcxSystemError, "flagcxCommInitRank: out of memory")
                                 : map_segment(invitation, nranks, segment);
        if (result == flagcxSuccess) {
            memcpy(segment->nonce, invitation->nonce, NONCE_BYTES);
            segment->next = segments;
            segments = segment;
        }
    }
    if (result == flagcxSuccess) {
        segment->references++;
        *opened = segment;
    } else {
        free(segment);
    }
    unlock_registry();
    return result;
}

void segment_release(struct segment *segment)
{
    lock_registry();
    if (--segment->references == 0) {
        struct segment **link = &segments;
        while (*link != segment)
            link = &(*link)->next;
        *link = segment->next;
        munmap(segment->base, segment->bytes);
        free(segment);
    }
    unlock_registry();
}
