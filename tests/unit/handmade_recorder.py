"""A recorder whose calls a test writes down by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_fl.comm.recorder import Mark, RecordedCall, Recorder


class HandmadeRecorder(Recorder):
    """Shows the calls that it was given; the last one is under way if it has no time out."""

    def __init__(self, name: str, ranks: Sequence[int], calls: Sequence[RecordedCall]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.device = torch.device("cpu")
        self._calls = list(calls)

    def entered(self) -> int:
        return self._calls[-1].number if self._calls else 0

    def calls(self) -> list[RecordedCall]:
        return list(self._calls)

    def under_way(self) -> RecordedCall | None:
        return next((call for call in self._calls if call.time_out_s is None), None)

    def ask_for_mark(self) -> None:
        """There is no device."""

    def take_mark(self) -> Mark | None:
        return None

    def mark_now(self) -> Mark | None:
        return None

    def refuse(self, reason: str) -> None:
        raise NotImplementedError("nothing calls through it")

    def abort(self, limit_s: float) -> bool:
        return False
