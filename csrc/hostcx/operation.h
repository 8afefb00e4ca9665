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

/* What begins a message in a ring: what it is part of, for the receiver to compare. */
struct message_head {
    _Alignas(CACHE_LINE) uint64_t magic;
    uint64_t bytes;
    uint64_t signature;
    uint64_t exchange;
};

static const uint64_t message_magic = 0x686f737463783a29u;

/* What an operation is, in a number that all ranks of it share, the two sides of point to point too. */
uint64_t signature_of(const struct operation *operation);

/* Puts an operation's signature, which may be another process's nonsense, in words. */
void describe_signature(uint64_t signature, char *text, size_t room);

/* One direction of point to point with one rank; a gather or an all-to-all is several of them. */
struct transfer {
    bool is_send;
    int peer;
    char *buffer;
    size_t bytes;
    uint64_t signature;
    /* Which of the gathers, scatters and all-to-alls it is part of, from 1 on; 0 in a send or receive. */
    uint64_t exchange;
    size_t moved;
    bool begun;
    /* In place: the index of the send whose bytes must leave before this one may overwrite them; or -1. */
    ptrdiff_t behind;
    /* The next transfer of the same direction and peer; or -1. */
    ptrdiff_t next;
};

/* Runs one collective to its end. */
flagcxResult_t run_collective(struct communicator *c, const struct operation *operation);

/* Looks for messages of exchanges that are over: nobody received them, so the ranks called different things. */
flagcxResult_t check_left_over(struct communicator *c);

/* Moves all transfers at once, to their end. Returns before the receivers have taken what the rings hold. */
flagcxResult_t run_transfers(struct communicator *c, struct transfer *transfers, size_t count);

#endif
