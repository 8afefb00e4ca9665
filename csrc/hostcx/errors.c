/* Errors: words per thread, one line on stderr for what nobody asked for, and names of codes. */
#include "errors.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "counts.h"

static _Thread_local char thread_message[MESSAGE_BYTES];

flagcxResult_t fail(flagcxResult_t code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(thread_message, sizeof thread_message, format, arguments);
    va_end(arguments);
    return code;
}

const char *last_error_of_thread(void) { return thread_message; }

void tell(const char *format, ...)
{
    char line[MESSAGE_BYTES + 64];
    int head = snprintf(line, sizeof line, "hostcx[%d]: ", (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + head, sizeof line - (size_t)head - 1, format, arguments);
    va_end(arguments);
    strcat(line, "\n");
    /* One write, so that lines of several ranks do not mix. */
    if (write(STDERR_FILENO, line, strlen(line)) < 0)
        return;
}

static void announce_now(void)
{
    const char *quiet = getenv("HOSTCX_QUIET");
    if (quiet != NULL && strcmp(quiet, "1") == 0)
        return;
    tell("FlagCX's C API over host memory, for tests and development, not for production "
         "(HOSTCX_QUIET=1 silences this line)");
}

void announce(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, announce_now);
}

const char *flagcxGetErrorString(flagcxResult_t result)
{
    static const char *const words[flagcxNumResults] = {
        [flagcxSuccess] = "success",
        [flagcxUnhandledDeviceError] = "the device reported an error",
        [flagcxSystemError] = "a call to the operating system failed",
        [flagcxInternalError] = "internal error: no communicator, an aborted one, or damaged shared memory",
        [flagcxInvalidArgument] = "an argument is invalid",
        [flagcxInvalidUsage] = "the call is not allowed here",
        [flagcxRemoteError] = "another rank died, left or failed",
        [flagcxInProgress] = "still in progress",
        [flagcxUnhandledCCLError] = "the vendor's communication library reported an error",
        [flagcxNotSupported] = "not supported",
    };
    count_call(CALL_flagcxGetErrorString);
    if ((int)result < 0 || (int)result >= flagcxNumResults)
        return "unknown result code";
    return words[result];
}
