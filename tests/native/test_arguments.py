"""Arguments that no C function can take: refused by name, before anything is started."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest

from sglang_fl.comm.backends.flagcx import FlagCXCommunicator, FlagCXError, FlagCXLibrary, ResultCode

from .conftest import LIMIT_S
from .recorder import Recorder

Call = Callable[[FlagCXCommunicator], object]

WRONG_INTEGERS: dict[str, Call] = {
    "barrier(stream=-1)": lambda communicator: communicator.barrier(stream=-1),
    "register(-1, 5)": lambda communicator: communicator.register(-1, 5),
    "register(5, -1)": lambda communicator: communicator.register(5, -1),
    "deregister(-1)": lambda communicator: communicator.deregister(-1),
    "window_register(-1, 5)": lambda communicator: communicator.window_register(-1, 5),
    "window_deregister(-1)": lambda communicator: communicator.window_deregister(-1),
    "mem_alloc(-1)": lambda communicator: communicator.library.mem_alloc(-1),
    "mem_free(-1)": lambda communicator: communicator.library.mem_free(-1),
    "set_device(2**40)": lambda communicator: communicator.library.set_device(2**40),
    "stream_synchronize(-1)": lambda communicator: communicator.library.stream_synchronize(-1),
}


@pytest.mark.parametrize("name", WRONG_INTEGERS)
def test_an_integer_that_does_not_fit_is_an_error_that_names_it(
    name: str, communicator: FlagCXCommunicator, recorder: Recorder
) -> None:
    value = "1099511627776" if "2**40" in name else "-1"
    recorder.forget()
    with pytest.raises(FlagCXError, match=rf"^{name.partition('(')[0]}\(.*{value}.*0 to 2\*\*64-1") as raised:
        WRONG_INTEGERS[name](communicator)
    assert raised.value.code == ResultCode.INVALID_ARGUMENT
    assert recorder.names() == []


@pytest.mark.parametrize(
    ("world_size", "rank", "device", "named"),
    [(2**31, 0, 0, "world of 2147483648"), (2, 0, 2**31, "device 2147483648"), (0, 0, 0, "world of 0")],
)
def test_a_creation_with_numbers_that_do_not_fit_is_refused(
    library: FlagCXLibrary, recorder: Recorder, world_size: int, rank: int, device: int, named: str
) -> None:
    recorder.forget()
    with pytest.raises(ValueError, match=named):
        FlagCXCommunicator.create(library, bytes(256), world_size, rank, LIMIT_S, device=device)
    assert recorder.names() == []
    library.close()  # no place inside the library is kept


WRONG_LIMITS = [None, math.nan, -1.0, "5"]


@pytest.mark.parametrize("limit", WRONG_LIMITS, ids=map(repr, WRONG_LIMITS))
@pytest.mark.parametrize("step", ["create", "unique_id", "close", "abort", "close, drain_s"])
def test_a_limit_that_is_no_time_is_refused_before_anything_is_started(
    step: str, limit: float, communicator: FlagCXCommunicator, library: FlagCXLibrary, recorder: Recorder
) -> None:
    steps: dict[str, Callable[[], object]] = {
        "create": lambda: FlagCXCommunicator.create(library, bytes(256), 1, 0, limit),
        "unique_id": lambda: library.unique_id(limit),
        "close": lambda: communicator.close(limit),
        "abort": lambda: communicator.abort(limit),
        "close, drain_s": lambda: communicator.close(drain_s=limit),
    }
    recorder.forget()
    named = "drain_s" if "drain_s" in step else "timeout_s"
    with pytest.raises(ValueError, match=re.escape(f"{named} is {limit!r}")):
        steps[step]()
    assert recorder.names() == []
    assert communicator.is_open


def test_an_infinite_limit_is_none(library: FlagCXLibrary) -> None:
    communicator = FlagCXCommunicator.create(library, library.unique_id(math.inf), 1, 0, math.inf)
    communicator.close(math.inf, math.inf)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_unique_id_may_be_anything_of_bytes(
    kind: Callable[[bytes], bytes], library: FlagCXLibrary, recorder: Recorder
) -> None:
    unique_id = bytes(range(256))
    FlagCXCommunicator.create(library, kind(unique_id), 1, 0, LIMIT_S).close()
    assert recorder.only("flagcxCommInitRank").values["id"] == unique_id.hex()


@pytest.mark.parametrize("unique_id", ["text", 256, None])
def test_a_unique_id_of_another_kind_is_refused(unique_id: bytes, library: FlagCXLibrary, recorder: Recorder) -> None:
    recorder.forget()
    with pytest.raises(FlagCXError, match=f"It is a {type(unique_id).__name__}") as raised:
        FlagCXCommunicator.create(library, unique_id, 1, 0, LIMIT_S)
    assert raised.value.code == ResultCode.BAD_UNIQUE_ID
    assert recorder.names() == []
