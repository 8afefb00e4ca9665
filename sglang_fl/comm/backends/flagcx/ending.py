"""Ending a communicator, with the limits that FlagCX does not have."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_fl.comm.backends.flagcx import jobs
from sglang_fl.comm.backends.flagcx.errors import FlagCXError, ResultCode
from sglang_fl.comm.backends.flagcx.native import Native

_PENDING_END_POLL_S = 0.005


@dataclass(frozen=True)
class Member:
    """One rank's handle of a communicator."""

    native: Native
    handle: Any
    world_size: int
    rank: int

    def calls_in_flight(self) -> int:
        """Calls of other threads and open groups at this moment."""
        return int(self.native.lib.sglang_fl_flagcx_calls_in_flight(self.handle))


def end(member: Member, start: Callable[..., Any], what: str, timeout_s: float, drain_s: float) -> None:
    """Run the job that ``start`` starts; while another one is under way, wait for that first. Nothing if it has ended.

    Raises:
        FlagCXError: IN_USE if calls are in flight or groups open after ``drain_s`` seconds, TIMED_OUT if the library,
            or the other job, has not come back after ``timeout_s`` seconds, or what the library answered.
    """
    jobs.check_limit("timeout_s", timeout_s)
    jobs.check_limit("drain_s", drain_s)
    deadline = time.monotonic() + timeout_s
    place = f"rank {member.rank} of {member.world_size}"
    code = member.native.ffi.new("int32_t *")
    handle = start(member.handle, min(drain_s, timeout_s), code)
    while code[0] == ResultCode.ENDING_NOW:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            details = f"{place}: another close or abort is still under way"
            raise jobs.timed_out(what, timeout_s, details, member.rank)
        time.sleep(min(_PENDING_END_POLL_S, left_s))
        handle = start(member.handle, max(0.0, min(drain_s, deadline - time.monotonic())), code)
    if code[0] == ResultCode.ALREADY_ENDED:
        return
    with jobs.started(member.native, what, handle, code[0]) as job:
        try:
            result = job.result(max(0.0, deadline - time.monotonic()))
        except jobs.TimeLimitError:
            raise jobs.timed_out(what, timeout_s, place, member.rank) from None
    if result == ResultCode.IN_USE:
        details = f"{member.calls_in_flight()} calls in flight or groups open after {drain_s:g} s"
        raise FlagCXError(result, what, details, rank=member.rank)
    if result != 0:
        raise FlagCXError(result, what, rank=member.rank)
