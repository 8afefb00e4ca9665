/* Steps: how collectives move. In a step, some ranks fill their own stage and all may read the stages.
 *
 * All ranks count the same steps, because all call the same collectives with the same arguments; each
 * stage says what it is part of, so that ranks that do not are told instead of mixing their data.
 */
#ifndef HOSTCX_STEPS_H
#define HOSTCX_STEPS_H

#include "operation.h"

/* This rank's stage of the step, once nobody reads its former content any more. */
flagcxResult_t step_acquire(struct communicator *c, char **stage);

/* Publishes the stage. */
void step_post(struct communicator *c, uint64_t signature);

/* The other rank's stage of the step, once it is published. */
flagcxResult_t step_await(struct communicator *c, int rank, uint64_t signature, const char **stage);

/* This rank needs nothing more of this step. */
void step_finish(struct communicator *c);

/* What an operation is, in a number that all ranks of it share. */
uint64_t signature_of(const struct operation *operation);

#endif
