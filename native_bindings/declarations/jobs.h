/* Jobs: what may block for ever runs in a thread of its own, which job_release gives up. */

sglang_fl_flagcx_job *sglang_fl_flagcx_start_unique_id(sglang_fl_flagcx_library *library, int32_t *code);
sglang_fl_flagcx_job *sglang_fl_flagcx_start_init(sglang_fl_flagcx_library *library, const uint8_t *unique_id,
                                                  size_t unique_id_bytes, int32_t world_size, int32_t rank,
                                                  int32_t device, int32_t *code);
sglang_fl_flagcx_job *sglang_fl_flagcx_start_destroy(sglang_fl_flagcx_communicator *communicator,
                                                     double drain_s, int32_t *code);
sglang_fl_flagcx_job *sglang_fl_flagcx_start_abort(sglang_fl_flagcx_communicator *communicator, double drain_s,
                                                   int32_t *code);
/* As start_abort, under calls in flight: only for a library that lets them return, and frees nothing before. */
sglang_fl_flagcx_job *sglang_fl_flagcx_start_interrupt(sglang_fl_flagcx_communicator *communicator,
                                                       double drain_s, int32_t *code);
int32_t sglang_fl_flagcx_job_wait(sglang_fl_flagcx_job *job, double seconds);
int32_t sglang_fl_flagcx_job_result(sglang_fl_flagcx_job *job);
void sglang_fl_flagcx_job_message(sglang_fl_flagcx_job *job, char *message, size_t message_bytes);
size_t sglang_fl_flagcx_job_unique_id(sglang_fl_flagcx_job *job, uint8_t *unique_id, size_t unique_id_bytes);
sglang_fl_flagcx_communicator *sglang_fl_flagcx_job_communicator(sglang_fl_flagcx_job *job);
void sglang_fl_flagcx_job_release(sglang_fl_flagcx_job *job);
