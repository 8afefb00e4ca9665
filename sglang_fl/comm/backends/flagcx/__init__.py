"""The binding to FlagCX: libflagcx opened at run time, called through the extension ``sglang_fl._flagcx``.

    library = FlagCXLibrary.open()                  # $FLAGCX_PATH, or open("/opt/FlagCX")
    library.capabilities                            # operations, dtypes, in-place rules, host or device memory
    unique_id = library.unique_id()                 # on one rank; how it reaches the others is the caller's matter
    communicator = FlagCXCommunicator.create(library, unique_id, world_size, rank, timeout_s=60)

    communicator.all_reduce(send, receive, count, DataType.FLOAT32, ReduceOp.SUM, stream)    # integers
    with communicator.group():
        communicator.send(buffer, count, dtype, peer, stream)
        communicator.recv(other, count, dtype, peer, stream)
    communicator.close()                            # or abort(); library.close() after the last communicator

A hot path takes the C function once and compares its result with 0:

    all_reduce = library.function(FlagCXOperation.ALL_REDUCE)
    handle = communicator.handle
    code = all_reduce(handle, send, receive, count, dtype, op, stream)
    if code:
        raise communicator.error(code, FlagCXOperation.ALL_REDUCE, dtype, op, count)

``torch_data_types()`` maps torch dtypes to DataType. Everything that goes wrong is a FlagCXError; its
``is_unsupported`` tells a missing capability from a mistake. Importing this package loads neither torch nor the
extension.
"""

from sglang_fl.comm.backends.flagcx.communicator import FlagCXCommunicator
from sglang_fl.comm.backends.flagcx.dtypes import torch_data_types
from sglang_fl.comm.backends.flagcx.errors import FlagCXError, ResultCode
from sglang_fl.comm.backends.flagcx.group import Group
from sglang_fl.comm.backends.flagcx.library import FlagCXLibrary
from sglang_fl.comm.backends.flagcx.types import (
    IN_PLACE,
    ITEM_BYTES,
    DataType,
    FlagCXCapabilities,
    FlagCXOperation,
    Form,
    InPlace,
    MemoryKind,
    ReduceOp,
    WindowFlags,
)

__all__ = [
    "IN_PLACE",
    "ITEM_BYTES",
    "DataType",
    "FlagCXCapabilities",
    "FlagCXCommunicator",
    "FlagCXError",
    "FlagCXLibrary",
    "FlagCXOperation",
    "Form",
    "Group",
    "InPlace",
    "MemoryKind",
    "ReduceOp",
    "ResultCode",
    "WindowFlags",
    "torch_data_types",
]
