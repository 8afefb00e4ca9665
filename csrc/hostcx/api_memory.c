/* FlagCX's memory and registration: over host memory a registration changes nothing, but is checked. */
#include <pthread.h>
#include <stdlib.h>

#include "communicator.h"
#include "counts.h"

enum { MEMORY_ALIGNMENT = 4096 };

/* A registered buffer or window. */
struct registration {
    struct registration *next;
    struct flagcxComm *comm;
    enum call call;
};

static pthread_mutex_t registrations_lock = PTHREAD_MUTEX_INITIALIZER;
static struct registration *registrations;

static flagcxResult_t no_shmem(const char *function)
{
    return fail(flagcxInternalError, "%s: allocator %d (NVSHMEM) is not there; allowed is %d", function, flagcxMemSHMEM,
                flagcxMemCCL);
}

flagcxResult_t flagcxMemAlloc(void **pointer, size_t bytes, flagcxMemAllocator_t allocator)
{
    count_call(CALL_flagcxMemAlloc);
    if (pointer == NULL || bytes == 0)
        return fail(flagcxInvalidArgument, "flagcxMemAlloc: %s", pointer == NULL ? "the pointer is NULL" : "0 bytes");
    if (allocator == flagcxMemSHMEM)
        return no_shmem("flagcxMemAlloc");
    *pointer = NULL;
    if (posix_memalign(pointer, MEMORY_ALIGNMENT, bytes) != 0)
        return fail(flagcxSystemError, "flagcxMemAlloc: no memory for %zu bytes", bytes);
    return flagcxSuccess;
}

flagcxResult_t flagcxMemFree(void *pointer, flagcxMemAllocator_t allocator)
{
    count_call(CALL_flagcxMemFree);
    if (pointer != NULL && allocator == flagcxMemSHMEM)
        return no_shmem("flagcxMemFree");
    free(pointer);
    return flagcxSuccess;
}

static struct registration *keep_registration(struct flagcxComm *comm, enum call call)
{
    struct registration *registration = malloc(sizeof *registration);
    if (registration == NULL)
        return NULL;
    pthread_mutex_lock(&registrations_lock);
    *registration = (struct registration){.next = registrations, .comm = comm, .call = call};
    registrations = registration;
    pthread_mutex_unlock(&registrations_lock);
    return registration;
}

/* Frees the registration; false if there is none such of this communicator. */
static bool drop_registration(const struct registration *dropped, const struct flagcxComm *comm, enum call call)
{
    bool found = false;
    pthread_mutex_lock(&registrations_lock);
    struct registration **link = &registrations;
    while (*link != NULL && *link != dropped)
        link = &(*link)->next;
    struct registration *registration = *link;
    if (registration != NULL && registration->comm == comm && registration->call == call) {
        *link = registration->next;
        free(registration);
        found = true;
    }
    pthread_mutex_unlock(&registrations_lock);
    return found;
}

/* As in FlagCX, comm may be NULL: the buffer is then registered for no communicator in particular. */
flagcxResult_t flagcxCommRegister(const flagcxComm_t comm, void *buffer, size_t bytes, void **handle,
                                  flagcxMemAllocator_t allocator)
{
    (void)allocator;
    count_call(CALL_flagcxCommRegister);
    flagcxResult_t result = comm != NULL ? communicator_check(comm) : flagcxSuccess;
    if (result != flagcxSuccess)
        return result;
    if (buffer == NULL || bytes == 0 || handle == NULL)
        return fail_call(comm, flagcxInvalidArgument, "flagcxCommRegister: %s", bytes == 0 ? "0 bytes" : "a pointer is NULL");
    *handle = keep_registration(comm, CALL_flagcxCommRegister);
    return *handle != NULL ? flagcxSuccess : fail_call(comm, flagcxSystemError, "flagcxCommRegister: out of memory");
}

flagcxResult_t flagcxCommDeregister(const flagcxComm_t comm, void *handle, flagcxMemAllocator_t allocator)
{
    (void)allocator;
    count_call(CALL_flagcxCommDeregister);
    flagcxResult_t result = comm != NULL ? communicator_check_handle(comm) : flagcxSuccess;
    if (result != flagcxSuccess || handle == NULL)
        return result;
    if (drop_registration(handle, comm, CALL_flagcxCommRegister))
        return flagcxSuccess;
    return fail_call(comm, flagcxInvalidArgument, "flagcxCommDeregister: the handle is not one that flagcxCommRegister "
                                                  "gave for this communicator, or was deregistered before");
}

flagcxResult_t flagcxCommWindowRegister(flagcxComm_t comm, void *buffer, size_t bytes, flagcxWindow_t *window,
                                        int flags, flagcxMemAllocator_t allocator)
{
    count_call(CALL_flagcxCommWindowRegister);
    if (window == NULL || *window != NULL)
        return fail_call(comm, flagcxInvalidArgument, "flagcxCommWindowRegister: %s",
                         window == NULL ? "the pointer to the window is NULL" : "the window must be NULL on entry");
    flagcxResult_t result = communicator_check(comm);
    if (result != flagcxSuccess || allocator == flagcxMemSHMEM)
        return result;
    if (buffer == NULL || bytes == 0)
        return fail_call(comm, flagcxInvalidArgument, "flagcxCommWindowRegister: %s",
                         bytes == 0 ? "0 bytes" : "the buffer is NULL");
    if ((flags & ~FLAGCX_WIN_COLL_SYMMETRIC) != 0)
        return fail_call(comm, flagcxInvalidArgument, "flagcxCommWindowRegister: flags are %#x; allowed are 0 and %#x",
                         (unsigned)flags, FLAGCX_WIN_COLL_SYMMETRIC);
    *window = (flagcxWindow_t)keep_registration(comm, CALL_flagcxCommWindowRegister);
    return *window != NULL ? flagcxSuccess
                           : fail_call(comm, flagcxSystemError, "flagcxCommWindowRegister: out of memory");
}

flagcxResult_t flagcxCommWindowDeregister(flagcxComm_t comm, flagcxWindow_t window, flagcxMemAllocator_t allocator)
{
    count_call(CALL_flagcxCommWindowDeregister);
    if (window == NULL || allocator == flagcxMemSHMEM)
        return flagcxSuccess;
    flagcxResult_t result = communicator_check_handle(comm);
    if (result != flagcxSuccess)
        return result;
    if (drop_registration((const struct registration *)window, comm, CALL_flagcxCommWindowRegister))
        return flagcxSuccess;
    return fail_call(comm, flagcxInvalidArgument, "flagcxCommWindowDeregister: the window is not one of this "
                                                  "communicator, or was deregistered before");
}
