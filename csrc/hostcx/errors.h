/* Errors: a result code for the caller and words for flagcxGetLastError. */
#ifndef HOSTCX_ERRORS_H
#define HOSTCX_ERRORS_H

#include "flagcx_api.h"

enum { MESSAGE_BYTES = 512 };

/* Keeps the words as this thread's last error and returns the code. */
flagcxResult_t fail(flagcxResult_t code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* This thread's last error; "" if there was none. */
const char *last_error_of_thread(void);

/* Prints one line to stderr, named hostcx and this process. */
void tell(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Says once per process that this library is for tests, unless HOSTCX_QUIET=1. */
void announce(void);

#endif
