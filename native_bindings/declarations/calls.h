/* The last calls of a communicator: recorded by the call path itself, read from any thread. */

enum sglang_fl_flagcx_operation {
  SGLANG_FL_FLAGCX_ALL_REDUCE,
  SGLANG_FL_FLAGCX_REDUCE,
  SGLANG_FL_FLAGCX_REDUCE_SCATTER,
  SGLANG_FL_FLAGCX_ALL_GATHER,
  SGLANG_FL_FLAGCX_BROADCAST,
  SGLANG_FL_FLAGCX_GATHER,
  SGLANG_FL_FLAGCX_SCATTER,
  SGLANG_FL_FLAGCX_ALL_TO_ALL,
  SGLANG_FL_FLAGCX_ALL_TO_ALL_V,
  SGLANG_FL_FLAGCX_BARRIER,
  SGLANG_FL_FLAGCX_SEND,
  SGLANG_FL_FLAGCX_RECV,
  SGLANG_FL_FLAGCX_GROUP_END,
  SGLANG_FL_FLAGCX_OPERATIONS
};

/* dtype and peer are -1 where the operation has none; place is a number of the caller's, 0 for none. Times are nanoseconds since the epoch, out 0 while the call
   is under way; result is what the library answered. */
typedef struct {
  uint64_t number;
  uint64_t count;
  uint64_t stream;
  uint64_t time_in_ns;
  uint64_t time_out_ns;
  int32_t operation;
  int32_t dtype;
  int32_t peer;
  int32_t captured;
  int32_t place;
  int32_t result;
} sglang_fl_flagcx_call;

/* Record from now on, in a ring of size calls. is_capturing: 0, or the address of the device runtime's function
   int (void *stream, int *status) that says whether a stream is being captured (status not 0). Once only. */
int32_t sglang_fl_flagcx_record(sglang_fl_flagcx_communicator *communicator, size_t size, uintptr_t is_capturing);
/* Give the ring's memory back, if the communicator has ended; nobody may read it any more. */
void sglang_fl_flagcx_free_calls(sglang_fl_flagcx_communicator *communicator);

/* The place of the next call; the operations that a model calls in every layer take it as an argument. */
void sglang_fl_flagcx_next_place(sglang_fl_flagcx_communicator *communicator, int32_t place);
int32_t sglang_fl_flagcx_all_reduce_from(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                         uintptr_t receive, size_t count, int32_t dtype, int32_t op,
                                         uintptr_t stream, int32_t place);
int32_t sglang_fl_flagcx_reduce_scatter_from(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                             uintptr_t receive, size_t receive_count, int32_t dtype, int32_t op,
                                             uintptr_t stream, int32_t place);
int32_t sglang_fl_flagcx_all_gather_from(sglang_fl_flagcx_communicator *communicator, uintptr_t send,
                                         uintptr_t receive, size_t send_count, int32_t dtype, uintptr_t stream,
                                         int32_t place);

uint64_t sglang_fl_flagcx_calls_entered(const sglang_fl_flagcx_communicator *communicator);
int32_t sglang_fl_flagcx_has_captured(const sglang_fl_flagcx_communicator *communicator);
/* Copy the calls that are kept, oldest first, and return how many. */
size_t sglang_fl_flagcx_read_calls(const sglang_fl_flagcx_communicator *communicator, sglang_fl_flagcx_call *calls,
                                   size_t capacity);
/* 1 with the call of that number, or the oldest that has not returned; 0 if there is none. */
int32_t sglang_fl_flagcx_read_call(const sglang_fl_flagcx_communicator *communicator, uint64_t number,
                                   sglang_fl_flagcx_call *call);
int32_t sglang_fl_flagcx_call_under_way(const sglang_fl_flagcx_communicator *communicator,
                                        sglang_fl_flagcx_call *call);

/* Let the next calls that succeed outside of a capture answer MARK_DUE, until mark_made. */
void sglang_fl_flagcx_ask_for_mark(sglang_fl_flagcx_communicator *communicator);
void sglang_fl_flagcx_mark_made(sglang_fl_flagcx_communicator *communicator);
/* Let all further calls answer CLOSED; those under way go on. */
void sglang_fl_flagcx_refuse(sglang_fl_flagcx_communicator *communicator);
