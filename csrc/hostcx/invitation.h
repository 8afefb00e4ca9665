/* A unique id, taken apart: which segment it leads to. */
#ifndef HOSTCX_INVITATION_H
#define HOSTCX_INVITATION_H

#include "flagcx_api.h"

enum { NONCE_BYTES = 16 };

struct invitation {
    unsigned char nonce[NONCE_BYTES];
    int32_t creator;
    int32_t descriptor;
    uint64_t creator_start_time;
};

flagcxResult_t invitation_write(const struct invitation *invitation, flagcxUniqueId *id);

/* Reads an id: whole, in this format, made on this machine. */
flagcxResult_t invitation_read(const flagcxUniqueId *id, struct invitation *invitation);

#endif
