"""Calls that serving may make beside the recorded ones: what an operator must get right before it is a default.

Each snippet runs on the host under the recorder; the sweep then makes the same calls on the device and judges their
values, not their time.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import torch

from sglang_fl.aten.sweep.cases import PROBE, Case, CaseFile
from sglang_fl.aten.sweep.recorder import Recorder

MODEL = "probes"


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).sub(3).view(shape).to(dtype)


def _add() -> None:
    _numbers(4, 6).add_(_numbers(6))
    _numbers(4, 6).t().add_(_numbers(6, 4), alpha=2)
    _numbers(4, 6, dtype=torch.bfloat16).add_(_numbers(4, 1, dtype=torch.bfloat16))
    _numbers(4, 6, dtype=torch.bfloat16).add_(_numbers(4, 6))
    _numbers(5, dtype=torch.int64).add_(3)
    _numbers(0).add_(1.5)


def _arange() -> None:
    torch.arange(0.0, 1.0, 0.25)
    torch.arange(1.5, 7)
    torch.arange(2, 11, 3)
    torch.arange(10, 0, -3)
    torch.arange(3, 3)
    torch.arange(0, 64, 2, dtype=torch.float32)
    torch.arange(0, 9, dtype=torch.bfloat16)
    torch.arange(1, 300, dtype=torch.int32)


def _cat() -> None:
    torch.cat([_numbers(2, 3), _numbers(4, 3)])
    torch.cat([_numbers(2, 3), _numbers(2, 5)], dim=-1)
    torch.cat([_numbers(0), _numbers(5)])
    torch.cat([_numbers(0, 3), _numbers(2, 3), _numbers(0, 3)])
    torch.cat([_numbers(3, 2).t(), _numbers(2, 3)], dim=1)
    torch.cat([_numbers(4, dtype=torch.int32), _numbers(4, dtype=torch.int64)])
    torch.cat([_numbers(4, dtype=torch.bfloat16), _numbers(4)])
    torch.cat([_numbers(2, 2, 2)[:, ::2], _numbers(2, 1, 2)], dim=1)


def _clamp() -> None:
    _numbers(40).clamp(min=2)
    _numbers(40).clamp(max=2.5)
    _numbers(40, dtype=torch.int64).clamp(min=1, max=20)
    _numbers(40, dtype=torch.int64).clamp(min=1.5)
    _numbers(4, 6).t().clamp(-1, 1)
    torch.tensor([float("nan"), float("inf"), -1.0, 3.0]).clamp(0, 2)
    _numbers(40, dtype=torch.bfloat16).clamp(3, 1)


def _embedding() -> None:
    table = _numbers(50, 8, dtype=torch.bfloat16)
    torch.nn.functional.embedding(torch.tensor([[1, 49], [0, 7]]), table)
    torch.nn.functional.embedding(torch.tensor([3, 3, 0], dtype=torch.int32), table)
    torch.nn.functional.embedding(torch.tensor([], dtype=torch.int64), table)
    torch.nn.functional.embedding(torch.tensor([0, 2, 1]), table, padding_idx=2)
    torch.nn.functional.embedding(torch.arange(6)[::2], _numbers(50, 16)[:, :7])


def _gather() -> None:
    table = _numbers(6, 9)
    table.gather(0, torch.tensor([[5, 0, 1]]))
    table.gather(-1, torch.tensor([[8], [0], [3]]))
    table.t().gather(1, torch.tensor([[5, 0], [1, 1]]))
    _numbers(2, 3, 4, dtype=torch.bfloat16).gather(1, torch.zeros(2, 5, 4, dtype=torch.int64))
    table.gather(1, torch.zeros(0, 9, dtype=torch.int64))


def _ge() -> None:
    _numbers(4, 6).ge(_numbers(4, 1))
    _numbers(4, 6).ge(_numbers(6, 4).t())
    _numbers(6, dtype=torch.int32).ge(_numbers(6))
    torch.tensor([float("nan"), 1.0]).ge(torch.tensor([0.0, float("nan")]))
    _numbers(1).ge(_numbers(3, 2, 5))


def _index() -> None:
    table = _numbers(6, 4, 3)
    table[torch.tensor([5, -1, 0])]
    table[:, torch.tensor([3, 0])]
    table[torch.tensor([[0], [2]]), torch.tensor([1, 3])]
    table[torch.tensor([0, 2]), :, torch.tensor([1, 2])]
    table[table[:, 0, 0] > 9]
    table.transpose(0, 1)[torch.tensor([1, 1])]
    table[torch.zeros(0, dtype=torch.int64)]
    _numbers(7, dtype=torch.bfloat16)[torch.tensor([6, 2], dtype=torch.int32)]


def _mean() -> None:
    _numbers(4, 6, 5).mean(dim=-1, keepdim=True)
    _numbers(4, 6, 5).mean(dim=(0, 2))
    _numbers(4, 6).t().mean(0)
    _numbers(300, dtype=torch.bfloat16).view(3, 100).mean(1, dtype=torch.float32)
    _numbers(4, 2000, dtype=torch.bfloat16).mean(-1)
    _numbers(4, 6).mean(dim=[0, 1])


def _rsqrt() -> None:
    torch.tensor([4.0, 0.0, -1.0, float("inf"), float("nan")]).rsqrt()
    _numbers(9, dtype=torch.int64).abs().rsqrt()
    _numbers(4, 6, dtype=torch.bfloat16).abs().add(1).t().rsqrt()


def _true_divide() -> None:
    _numbers(4, 6).div_(_numbers(4, 1).add(10))
    _numbers(4, 6).t().div_(_numbers(6, 4).add(100))
    _numbers(5).div_(0.0)
    _numbers(6, dtype=torch.bfloat16).div_(_numbers(6).add(7))
    _numbers(4, 6).div_(3)


def _zero() -> None:
    _numbers(4, 6).t()[1:3].zero_()
    _numbers(7, dtype=torch.bfloat16).zero_()
    _numbers(6, dtype=torch.int64)[::2].zero_()
    torch.ones(5, dtype=torch.bool).zero_()
    _numbers(0).zero_()


def _zeros_like() -> None:
    torch.zeros_like(_numbers(4, 6).t())
    torch.zeros_like(_numbers(4, 6), dtype=torch.int32)
    torch.zeros_like(_numbers(2, 3, 4).permute(2, 0, 1))
    torch.zeros_like(_numbers(4, 12)[:, ::2])
    torch.zeros_like(torch.ones(3, dtype=torch.bool))


# The operator that each is about; what else it calls to make its tensors is not kept.
SNIPPETS: dict[str, Callable[[], None]] = {
    "add_": _add,
    "arange": _arange,
    "cat": _cat,
    "clamp": _clamp,
    "embedding": _embedding,
    "gather": _gather,
    "ge": _ge,
    "index": _index,
    "mean": _mean,
    "rsqrt": _rsqrt,
    "div_": _true_divide,
    "zero_": _zero,
    "zeros_like": _zeros_like,
}


def record() -> CaseFile:
    """The calls of all snippets, under the phase PROBE."""
    cases = [case for operator, snippet in SNIPPETS.items() for case in _calls_of(operator, snippet)]
    return CaseFile({"model": MODEL, "device": "any", "torch": version("torch")}, cases)


def _calls_of(operator: str, snippet: Callable[[], None]) -> list[Case]:
    recorder = Recorder("cpu")
    with torch.inference_mode(), recorder, recorder.phase(PROBE):
        snippet()
    return [case for case in recorder.cases() if case.operator.partition(".")[0] == operator]
