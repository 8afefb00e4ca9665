/* The walks of the driver, each over one subject. They count failures; none of them ends the process. */
#ifndef HOSTCX_TESTS_WALKS_H
#define HOSTCX_TESTS_WALKS_H

/* Every collective, type, operation, in and out of place, counts 0 to one million. */
void walk_collectives(int nranks);

/* Rounding of float16 and bfloat16, wrapping and averages of integers, NaN, against other arithmetic. */
void walk_arithmetic(void);

/* Send and receive, groups, several communicators. */
void walk_groups(int nranks);

/* Device handle, memory, registration, questions, one-sided operations, wrong arguments. */
void walk_interface(int nranks);

/* Wrong unique ids, wrong use while joining. */
void walk_joining(int nranks);

/* Abort, ranks that leave, damaged shared memory. */
void walk_failures(int nranks);

/* Ranks that do not make the same call. */
void walk_disagreement(int nranks);

/* Killed processes; only where ranks are processes. */
void walk_deaths(int nranks);

/* Memory that a large message takes and processor time that waiting takes; only without sanitizers. */
void walk_costs(int nranks);

/* One all_reduce, for the builds with a planted fault. */
void walk_planted(int nranks);

#endif
