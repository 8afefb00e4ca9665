/* One call of a collective or of point to point, as the API received it. */
#ifndef HOSTCX_OPERATION_H
#define HOSTCX_OPERATION_H

#include "communicator.h"
#include "counts.h"

struct operation {
    enum call call;
    const void *send;
    void *receive;
    size_t count;
    flagcxDataType_t datatype;
    flagcxRedOp_t op;
    /* The root, or the peer of point to point. */
    int root;
};

/* One direction of point to point with one rank; a gather or an all-to-all is several of them. */
struct transfer {
    bool is_send;
    int peer;
    char *buffer;
    size_t bytes;
    size_t moved;
    bool begun;
    /* In place: the index of the send whose bytes must leave before this one may overwrite them; or -1. */
    ptrdiff_t behind;
    /* The next transfer of the same direction and peer; or -1. */
    ptrdiff_t next;
};

/* Runs one collective to its end. */
flagcxResult_t run_collective(struct communicator *c, const struct operation *operation);

/* Moves all transfers at once, to their end. Returns before the receivers have taken what the rings hold. */
flagcxResult_t run_transfers(struct communicator *c, struct transfer *transfers, size_t count);

#endif
