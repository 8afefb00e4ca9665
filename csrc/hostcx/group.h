/* Groups: calls that are collected per thread and started together at the outermost end. */
#ifndef HOSTCX_GROUP_H
#define HOSTCX_GROUP_H

#include "operation.h"

/* Runs the collective now, or at the end of the open group. */
flagcxResult_t submit_collective(struct flagcxComm *comm, const struct operation *operation);

/* Begins a gather, scatter or all-to-all, which all ranks must call; its transfers follow. */
flagcxResult_t add_exchange(struct flagcxComm *comm);

/* Adds one transfer to the open group; there must be one. */
flagcxResult_t add_transfer(struct flagcxComm *comm, const struct transfer *transfer);

/* Position at which the next transfer will stand among those of its communicator. */
ptrdiff_t next_transfer_index(const struct flagcxComm *comm);

void group_begin(void);

/* Starts everything at the outermost level. The first error of a call within the group wins, and then
 * nothing is started. */
flagcxResult_t group_end(void);

/* Notes an error of a call: if a group is open, the group will fail. Returns the code. */
flagcxResult_t poison_group(flagcxResult_t code);

#endif
