/* FlagCX's device handle for the one "device" that host memory is.
 *
 * The vendor is "HOST": by it a binding sees that buffers are ordinary memory. Everything has happened
 * when a call returns, so that streams and events have nothing to order; events only keep their time.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "counts.h"
#include "errors.h"

enum { MEMORY_ALIGNMENT = 4096 };

struct flagcxStream {
    void *raw;
};

struct flagcxEvent {
    struct timespec time;
};

static flagcxResult_t is_null(const char *function, const char *argument)
{
    return fail(flagcxInvalidArgument, "%s: %s is NULL", function, argument);
}

static flagcxResult_t device_synchronize(void)
{
    count_call(CALL_deviceSynchronize);
    return flagcxSuccess;
}

static flagcxResult_t device_memcpy(void *destination, void *source, size_t bytes, flagcxMemcpyType_t type,
                                    flagcxStream_t stream)
{
    (void)type;
    (void)stream;
    count_call(CALL_deviceMemcpy);
    if (bytes > 0 && (destination == NULL || source == NULL))
        return is_null("deviceMemcpy", destination == NULL ? "the destination" : "the source");
    if (bytes > 0)
        memmove(destination, source, bytes);
    return flagcxSuccess;
}

static flagcxResult_t device_memset(void *pointer, int value, size_t bytes, flagcxMemType_t type,
                                    flagcxStream_t stream)
{
    (void)type;
    (void)stream;
    count_call(CALL_deviceMemset);
    if (bytes > 0 && pointer == NULL)
        return is_null("deviceMemset", "the pointer");
    if (bytes > 0)
        memset(pointer, value, bytes);
    return flagcxSuccess;
}

static flagcxResult_t device_malloc(void **pointer, size_t bytes, flagcxMemType_t type, flagcxStream_t stream)
{
    (void)type;
    (void)stream;
    count_call(CALL_deviceMalloc);
    if (pointer == NULL)
        return is_null("deviceMalloc", "the pointer");
    *pointer = NULL;
    if (bytes > 0 && posix_memalign(pointer, MEMORY_ALIGNMENT, bytes) != 0)
        return fail(flagcxUnhandledDeviceError, "deviceMalloc: no memory for %zu bytes", bytes);
    return flagcxSuccess;
}

static flagcxResult_t device_free(void *pointer, flagcxMemType_t type, flagcxStream_t stream)
{
    (void)type;
    (void)stream;
    count_call(CALL_deviceFree);
    free(pointer);
    return flagcxSuccess;
}

static flagcxResult_t set_device(int device)
{
    count_call(CALL_setDevice);
    if (device != 0)
        return fail(flagcxUnhandledDeviceError, "setDevice: device %d does not exist; host memory is device 0, of all "
                                                "ranks",
                    device);
    return flagcxSuccess;
}

static flagcxResult_t get_device(int *device)
{
    count_call(CALL_getDevice);
    if (device == NULL)
        return is_null("getDevice", "the pointer");
    *device = 0;
    return flagcxSuccess;
}

static flagcxResult_t get_device_count(int *count)
{
    count_call(CALL_getDeviceCount);
    if (count == NULL)
        return is_null("getDeviceCount", "the pointer");
    *count = 1;
    return flagcxSuccess;
}

static flagcxResult_t get_vendor(char *vendor)
{
    count_call(CALL_getVendor);
    if (vendor == NULL)
        return is_null("getVendor", "the buffer");
    strcpy(vendor, "HOST");
    return flagcxSuccess;
}

static flagcxResult_t host_get_device_pointer(void **device_pointer, void *host_pointer)
{
    count_call(CALL_hostGetDevicePointer);
    if (device_pointer == NULL || host_pointer == NULL)
        return is_null("hostGetDevicePointer", "a pointer");
    *device_pointer = host_pointer;
    return flagcxSuccess;
}

static flagcxResult_t box_stream(flagcxStream_t *stream, void *raw, const char *function)
{
    if (stream == NULL)
        return is_null(function, "the pointer");
    *stream = malloc(sizeof **stream);
    if (*stream == NULL)
        return fail(flagcxSystemError, "%s: out of memory", function);
    (*stream)->raw = raw;
    return flagcxSuccess;
}

static flagcxResult_t stream_create(flagcxStream_t *stream)
{
    count_call(CALL_streamCreate);
    return box_stream(stream, NULL, "streamCreate");
}

static flagcxResult_t stream_destroy(flagcxStream_t stream)
{
    count_call(CALL_streamDestroy);
    free(stream);
    return flagcxSuccess;
}

static flagcxResult_t stream_copy(flagcxStream_t *stream, void *raw)
{
    count_call(CALL_streamCopy);
    return box_stream(stream, raw, "streamCopy");
}

static flagcxResult_t stream_free(flagcxStream_t stream)
{
    count_call(CALL_streamFree);
    free(stream);
    return flagcxSuccess;
}

static flagcxResult_t stream_synchronize(flagcxStream_t stream)
{
    (void)stream;
    count_call(CALL_streamSynchronize);
    return flagcxSuccess;
}

static flagcxResult_t stream_query(flagcxStream_t stream)
{
    (void)stream;
    count_call(CALL_streamQuery);
    return flagcxSuccess;
}

static flagcxResult_t stream_wait_event(flagcxStream_t stream, flagcxEvent_t event)
{
    (void)stream;
    (void)event;
    count_call(CALL_streamWaitEvent);
    return flagcxSuccess;
}

static flagcxResult_t event_create(flagcxEvent_t *event, flagcxEventType_t type)
{
    (void)type;
    count_call(CALL_eventCreate);
    if (event == NULL)
        return is_null("eventCreate", "the pointer");
    *event = calloc(1, sizeof **event);
    return *event != NULL ? flagcxSuccess : fail(flagcxSystemError, "eventCreate: out of memory");
}

static flagcxResult_t event_destroy(flagcxEvent_t event)
{
    count_call(CALL_eventDestroy);
    free(event);
    return flagcxSuccess;
}

static flagcxResult_t event_record(flagcxEvent_t event, flagcxStream_t stream)
{
    (void)stream;
    count_call(CALL_eventRecord);
    if (event == NULL)
        return is_null("eventRecord", "the event");
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    return flagcxSuccess;
}

static flagcxResult_t event_synchronize(flagcxEvent_t event)
{
    (void)event;
    count_call(CALL_eventSynchronize);
    return flagcxSuccess;
}

static flagcxResult_t event_query(flagcxEvent_t event)
{
    (void)event;
    count_call(CALL_eventQuery);
    return flagcxSuccess;
}

static flagcxResult_t event_elapsed_time(float *milliseconds, flagcxEvent_t start, flagcxEvent_t end)
{
    count_call(CALL_eventElapsedTime);
    if (milliseconds == NULL || start == NULL || end == NULL)
        return is_null("eventElapsedTime", "an argument");
    double seconds = (double)(end->time.tv_sec - start->time.tv_sec);
    double nanoseconds = (double)(end->time.tv_nsec - start->time.tv_nsec);
    *milliseconds = (float)(seconds * 1e3 + nanoseconds / 1e6);
    return flagcxSuccess;
}

/* Ordinary memory of one process cannot be opened by another. */
static flagcxResult_t no_ipc(enum call call)
{
    count_call(call);
    return fail(flagcxNotSupported, "%s: host memory has no handles for other processes", call_name(call));
}

static flagcxResult_t ipc_create(flagcxIpcMemHandle_t *handle, size_t *bytes)
{
    (void)handle;
    (void)bytes;
    return no_ipc(CALL_ipcMemHandleCreate);
}

static flagcxResult_t ipc_get(flagcxIpcMemHandle_t handle, void *pointer)
{
    (void)handle;
    (void)pointer;
    return no_ipc(CALL_ipcMemHandleGet);
}

static flagcxResult_t ipc_open(flagcxIpcMemHandle_t handle, void **pointer)
{
    (void)handle;
    (void)pointer;
    return no_ipc(CALL_ipcMemHandleOpen);
}

static flagcxResult_t ipc_close(void *pointer)
{
    (void)pointer;
    return no_ipc(CALL_ipcMemHandleClose);
}

static flagcxResult_t ipc_free(flagcxIpcMemHandle_t handle)
{
    (void)handle;
    return no_ipc(CALL_ipcMemHandleFree);
}

static const struct flagcxDeviceHandle host_device = {
    .deviceSynchronize = device_synchronize,
    .deviceMemcpy = device_memcpy,
    .deviceMemset = device_memset,
    .deviceMalloc = device_malloc,
    .deviceFree = device_free,
    .setDevice = set_device,
    .getDevice = get_device,
    .getDeviceCount = get_device_count,
    .getVendor = get_vendor,
    .hostGetDevicePointer = host_get_device_pointer,
    .streamCreate = stream_create,
    .streamDestroy = stream_destroy,
    .streamCopy = stream_copy,
    .streamFree = stream_free,
    .streamSynchronize = stream_synchronize,
    .streamQuery = stream_query,
    .streamWaitEvent = stream_wait_event,
    .eventCreate = event_create,
    .eventDestroy = event_destroy,
    .eventRecord = event_record,
    .eventSynchronize = event_synchronize,
    .eventQuery = event_query,
    .eventElapsedTime = event_elapsed_time,
    .ipcMemHandleCreate = ipc_create,
    .ipcMemHandleGet = ipc_get,
    .ipcMemHandleOpen = ipc_open,
    .ipcMemHandleClose = ipc_close,
    .ipcMemHandleFree = ipc_free,
};

static flagcxResult_t new_device_handle(flagcxDeviceHandle_t *handle, const char *function)
{
    announce();
    *handle = malloc(sizeof **handle);
    if (*handle == NULL)
        return fail(flagcxSystemError, "%s: out of memory", function);
    **handle = host_device;
    return flagcxSuccess;
}

flagcxResult_t flagcxDeviceHandleInit(flagcxDeviceHandle_t *handle)
{
    count_call(CALL_flagcxDeviceHandleInit);
    if (handle == NULL)
        return is_null("flagcxDeviceHandleInit", "the pointer");
    return new_device_handle(handle, "flagcxDeviceHandleInit");
}

flagcxResult_t flagcxDeviceHandleFree(flagcxDeviceHandle_t handle)
{
    count_call(CALL_flagcxDeviceHandleFree);
    free(handle);
    return flagcxSuccess;
}

flagcxResult_t flagcxHandleInit(flagcxHandlerGroup_t *handler)
{
    count_call(CALL_flagcxHandleInit);
    if (handler == NULL)
        return is_null("flagcxHandleInit", "the pointer");
    *handler = calloc(1, sizeof **handler);
    if (*handler == NULL)
        return fail(flagcxSystemError, "flagcxHandleInit: out of memory");
    flagcxResult_t result = new_device_handle(&(*handler)->devHandle, "flagcxHandleInit");
    if (result == flagcxSuccess)
        return flagcxSuccess;
    free(*handler);
    *handler = NULL;
    return result;
}

flagcxResult_t flagcxHandleFree(flagcxHandlerGroup_t handler)
{
    count_call(CALL_flagcxHandleFree);
    if (handler != NULL)
        free(handler->devHandle);
    free(handler);
    return flagcxSuccess;
}
