/* The flat interface through which Python calls FlagCX: integers and opaque handles only.

   Every function that returns int32_t returns 0 for success, a flagcxResult_t (1 to 9) that the library
   answered, or one of the negative SGLANG_FL_FLAGCX_* results of types.h, which are the shim's own.
   The declarations lie in native_bindings/declarations, one file a subject, which cffi reads as well. */
#ifndef SGLANG_FL_FLAGCX_SHIM_H
#define SGLANG_FL_FLAGCX_SHIM_H

#include <stddef.h>
#include <stdint.h>

#include "declarations/types.h"

#include "declarations/library.h"
#include "declarations/device.h"
#include "declarations/jobs.h"
#include "declarations/communicator.h"
#include "declarations/calls.h"
#include "declarations/collectives.h"
#include "declarations/point_to_point.h"
#include "declarations/memory.h"

#endif
