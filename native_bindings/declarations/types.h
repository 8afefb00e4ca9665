/* Results, sizes and handles of the flat interface. No preprocessor lines: cffi and the C compiler both read it. */

enum {
  SGLANG_FL_FLAGCX_NULL_HANDLE = -1,    /* the library or communicator handle is NULL */
  SGLANG_FL_FLAGCX_CLOSED = -2,         /* the library or communicator was closed or aborted */
  SGLANG_FL_FLAGCX_MISSING_SYMBOL = -3, /* the opened library lacks the function */
  SGLANG_FL_FLAGCX_OUT_OF_MEMORY = -4,
  SGLANG_FL_FLAGCX_IN_USE = -5,         /* calls or communicators still live, nothing was ended */
  SGLANG_FL_FLAGCX_ALREADY_ENDED = -6,  /* another close or abort came first */
  SGLANG_FL_FLAGCX_NO_THREAD = -7,      /* the system gave no thread */
  SGLANG_FL_FLAGCX_BAD_UNIQUE_ID = -8,  /* a unique id of an impossible size */
  SGLANG_FL_FLAGCX_NOT_LOADED = -9,     /* dlopen refused the file */
  SGLANG_FL_FLAGCX_NO_MEMORY_GIVEN = -10, /* the library said success and returned no pointer */
  SGLANG_FL_FLAGCX_ENDING_NOW = -11,      /* another close or abort is under way: ask again */
  SGLANG_FL_FLAGCX_MARK_DUE = -12,        /* the call succeeded, and a device event behind it was asked for */
  SGLANG_FL_FLAGCX_BAD_SIZE = -13         /* the size of a ring is no power of two */
};

/* Bytes of a unique id as flagcx.h declares it, and the most that the shim can carry. */
enum { SGLANG_FL_FLAGCX_UNIQUE_ID_BYTES = 256, SGLANG_FL_FLAGCX_UNIQUE_ID_CAPACITY = 8192 };

typedef struct sglang_fl_flagcx_library sglang_fl_flagcx_library;
typedef struct sglang_fl_flagcx_communicator sglang_fl_flagcx_communicator;
typedef struct sglang_fl_flagcx_job sglang_fl_flagcx_job;
