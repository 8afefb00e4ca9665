/* The 256 bytes of a unique id: where the segment is, and proof that no byte was lost on the way. */
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "errors.h"
#include "identity.h"
#include "invitation.h"

static const char id_magic[8] = "HOSTCX";

enum { ID_VERSION = 1 };

/* Random bytes fill the rest, so that a zero byte or a short copy is seen by the check sum. */
struct id_layout {
    char magic[8];
    uint32_t version;
    int32_t creator;
    int32_t descriptor;
    uint32_t unused;
    uint64_t creator_start_time;
    struct machine machine;
    unsigned char nonce[NONCE_BYTES];
    unsigned char filling[FLAGCX_UNIQUE_ID_BYTES - 64 - sizeof(struct machine)];
    uint64_t check;
};

_Static_assert(sizeof(struct id_layout) <= FLAGCX_UNIQUE_ID_BYTES, "the id must fit into FlagCX's 256 bytes");

static uint64_t check_sum(const struct id_layout *layout)
{
    const unsigned char *bytes = (const unsigned char *)layout;
    uint64_t sum = 14695981039346656037u;
    for (size_t i = 0; i < offsetof(struct id_layout, check); i++)
        sum = (sum ^ bytes[i]) * 1099511628211u;
    return sum;
}

flagcxResult_t invitation_write(const struct invitation *invitation, flagcxUniqueId *id)
{
    struct id_layout layout;
    if (getrandom(&layout, sizeof layout, 0) != (ssize_t)sizeof layout)
        return fail(flagcxSystemError, "flagcxGetUniqueId: the system gave no random bytes");
    memcpy(layout.magic, id_magic, sizeof layout.magic);
    layout.version = ID_VERSION;
    layout.creator = invitation->creator;
    layout.descriptor = invitation->descriptor;
    layout.creator_start_time = invitation->creator_start_time;
    memcpy(layout.nonce, invitation->nonce, NONCE_BYTES);
    if (!machine_of_this_process(&layout.machine))
        return fail(flagcxSystemError, "flagcxGetUniqueId: /proc does not say which machine this is");
    layout.check = check_sum(&layout);
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &layout, sizeof layout);
    return flagcxSuccess;
}

flagcxResult_t invitation_read(const flagcxUniqueId *id, struct invitation *invitation)
{
    struct id_layout layout;
    struct machine here;
    memcpy(&layout, id->internal, sizeof layout);
    if (memcmp(layout.magic, id_magic, sizeof layout.magic) != 0)
        return fail(flagcxInvalidArgument, "flagcxCommInitRank: these %d bytes are no unique id of hostcx; one "
                                           "rank must call flagcxGetUniqueId and hand its id to the others",
                    FLAGCX_UNIQUE_ID_BYTES);
    if (layout.version != ID_VERSION)
        return fail(flagcxInvalidArgument,
                    "flagcxCommInitRank: the unique id has format %u, this library reads format %d; all ranks "
                    "must load the same library",
                    layout.version, ID_VERSION);
    if (layout.check != check_sum(&layout))
        return fail(flagcxInvalidArgument, "flagcxCommInitRank: the unique id was damaged on its way: all %d "
                                           "bytes must arrive, zero bytes too",
                    FLAGCX_UNIQUE_ID_BYTES);
    if (!machine_of_this_process(&here))
        return fail(flagcxSystemError, "flagcxCommInitRank: /proc does not say which machine this is");
    layout.machine.host_name[HOST_NAME_BYTES - 1] = '\0';
    if (memcmp(layout.machine.boot_id, here.boot_id, BOOT_ID_BYTES) != 0)
        return fail(flagcxInvalidUsage,
                    "flagcxCommInitRank: the unique id was made on another machine (%s), this rank runs on %s; "
                    "hostcx connects processes of one machine only",
                    layout.machine.host_name, here.host_name);
    if (layout.machine.pid_namespace != here.pid_namespace)
        return fail(flagcxInvalidUsage,
                    "flagcxCommInitRank: the unique id was made in another container of this machine (%s), "
                    "this rank runs in %s; all ranks must share one pid namespace",
                    layout.machine.host_name, here.host_name);
    invitation->creator = layout.creator;
    invitation->descriptor = layout.descriptor;
    invitation->creator_start_time = layout.creator_start_time;
    memcpy(invitation->nonce, layout.nonce, NONCE_BYTES);
    return flagcxSuccess;
}
