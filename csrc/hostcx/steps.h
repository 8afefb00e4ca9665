/* Steps: how collectives move. In a step, some ranks fill their own stage and all may read the stages.
 *
 * All ranks count the same steps, because all call the same collectives with the same arguments. In every
 * step every rank says what it is part of, whether it fills its stage or not, and in the last step of a
 * collective every rank compares that of all others: none returns from a collective that is not the same
 * everywhere, and so all begin the next one at the same step.
 */
#ifndef HOSTCX_STEPS_H
#define HOSTCX_STEPS_H

#include "operation.h"

/* This rank's stage of the step, once nobody reads its former content any more. */
flagcxResult_t step_acquire(struct communicator *c, uint64_t signature, char **stage);

/* Publishes the stage, or that the rank takes part without one. */
void step_post(struct communicator *c, uint64_t signature);

/* The other rank's stage of the step, once it is published. */
flagcxResult_t step_await(struct communicator *c, int rank, uint64_t signature, const char **stage);

/* This rank needs nothing more of this step. */
void step_finish(struct communicator *c);

#endif
