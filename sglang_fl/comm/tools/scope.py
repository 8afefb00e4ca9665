"""What the self-test tries: the cases of a plan on one communicator, and the tally of what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from sglang_fl.comm.backends.torch_dist.transport import REDUCIBLE
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.tools import data
from sglang_fl.comm.tools.data import Layout, Placed

KEPT_PROBLEMS = 3
_WIDE_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 5), (2, 3, 4), (0, 4), (1000,))
_FEW_SHAPES: tuple[tuple[int, ...], ...] = ((7,), (3, 5))
_LARGE_SHAPES: tuple[tuple[int, ...], ...] = ((65_539,), (128, 256))
_LARGEST_SHAPE = (2**20 + 3,)
# On a device alone: beyond what a small-message protocol, or SGLang's own kernels by nvidia.yaml, take.
_LARGEST_ON_DEVICE = (2**22 + 3,)


@dataclass(frozen=True)
class Case:
    """One combination that an operation is tried with."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout
    device: torch.device

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{str(self.dtype).removeprefix('torch.')} {shape} {self.layout.value} {self.device.type}"


def quick_cases(device: torch.device) -> tuple[Case, ...]:
    """Every dtype in two shapes, and every shape in every layout for float32."""
    few = [Case(dtype, shape, Layout.CONTIGUOUS, device) for dtype in data.DTYPES for shape in _FEW_SHAPES]
    wide = [Case(torch.float32, shape, layout, device) for shape in _SHAPES for layout in Layout]
    return tuple(dict.fromkeys([*few, *wide, *_host_cases(device)]))


def full_cases(device: torch.device) -> tuple[Case, ...]:
    """Every dtype in every shape and layout, and large shapes for some dtypes."""
    every = [Case(dtype, shape, layout, device) for dtype in data.DTYPES for shape in _SHAPES for layout in Layout]
    large = [
        Case(dtype, shape, layout, device) for dtype in _WIDE_DTYPES for shape in _LARGE_SHAPES for layout in Layout
    ]
    shapes = (_LARGEST_SHAPE,) if device.type == "cpu" else (_LARGEST_SHAPE, _LARGEST_ON_DEVICE)
    largest = [Case(torch.float32, shape, Layout.CONTIGUOUS, device) for shape in shapes]
    return (*every, *large, *largest, *_host_cases(device))


def _host_cases(device: torch.device) -> list[Case]:
    """Tensors on the CPU in a group whose device is another."""
    if device.type == "cpu":
        return []
    cpu = torch.device("cpu")
    return [Case(dtype, (3, 5), layout, cpu) for dtype in (torch.float32, torch.bool) for layout in Layout]


@dataclass
class Tally:
    """What came of one operation on one route, on this rank.

    Attributes:
        cases: how many were tried.
        wrong: elements that were wrong; a case that failed in another way counts as one.
        problems: the first few wrong cases in words.
        error: what ended the operation early; empty if nothing did.
        last: the latest case that came to its end.
    """

    cases: int = 0
    wrong: int = 0
    problems: list[str] = field(default_factory=list)
    error: str = ""
    last: str = ""

    def progress(self) -> str:
        """How far it got, for the report of a hang."""
        return f" after {self.cases} cases, the last of them: {self.last or 'none'}"

    def count(self, what: object, wrong: int | bool) -> None:
        """One more case."""
        self.cases += 1
        self.last = str(what)
        self.wrong += int(wrong)
        if wrong and len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(f"{what}: {int(wrong)} wrong")


@dataclass(frozen=True)
class Scope:
    """One operation's view: the communicator, the cases, where to count, and values for any rank.

    ``roots``: ranks tried as source or destination.
    """

    communicator: CommunicatorFL
    cases: Sequence[Case]
    roots: Sequence[int]
    tally: Tally
    seed: int

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.communicator.rank_in_group

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.communicator.world_size

    def random(self, case: Case, rank: int, shape: tuple[int, ...] | None = None, part: object = "") -> torch.Tensor:
        """What ``rank`` has in ``case``, as any bytes; on the CPU."""
        seed = data.seed_of(self.seed, case, part, rank)
        return data.random_bytes(case.shape if shape is None else shape, case.dtype, seed)

    def summand(self, case: Case, rank: int, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """What ``rank`` contributes to a sum; on the CPU."""
        return self._numbers(case, rank, shape).to(case.dtype)

    def total(self, case: Case, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The sum of all ranks' summands; on the CPU."""
        parts = [self._numbers(case, rank, shape) for rank in range(self.world_size)]
        return torch.stack(parts).sum(dim=0).to(case.dtype)

    def place(self, case: Case, values: torch.Tensor) -> Placed:
        """``values`` in the case's layout on its device."""
        return data.place(values, case.layout, case.device)

    def place_empty(self, case: Case, shape: tuple[int, ...]) -> Placed:
        """Room for a result in the case's layout on its device."""
        return data.place_empty(shape, case.dtype, case.layout, case.device)

    def summing_cases(self, call: Callable[[torch.Tensor], object]) -> Iterator[Case]:
        """Cases that the backend can sum; for every other dtype ``call`` must raise TypeError and change nothing."""
        refused: set[tuple[torch.dtype, torch.device]] = set()
        for case in self.cases:
            if case.dtype in self._reducible(case.device):
                yield case
            elif self.world_size > 1 and case.shape == (7,) and (case.dtype, case.device) not in refused:
                refused.add((case.dtype, case.device))
                self._refuses(case, call)

    def rows(self) -> list[int]:
        """Uneven numbers of rows, one a rank, with a zero from three ranks on."""
        return [(rank * 3 + 2) % 4 for rank in range(self.world_size)]

    def _numbers(self, case: Case, rank: int, shape: tuple[int, ...] | None) -> torch.Tensor:
        seed = data.seed_of(self.seed, case, rank)
        return data.whole_numbers(case.shape if shape is None else shape, case.dtype, seed, rank, self.world_size)

    def _reducible(self, device: torch.device) -> frozenset[torch.dtype]:
        transport = self.communicator.agreed.transport
        if transport is None or device.type != self.communicator.device.type:
            return REDUCIBLE
        return transport.capabilities.reducible

    def _refuses(self, case: Case, call: Callable[[torch.Tensor], object]) -> None:
        values = self.random(case, self.rank, (self.world_size * 2,))
        placed = self.place(case, values)
        try:
            call(placed.tensor)
        except TypeError as error:
            self.tally.count(f"TypeError for {case}", str(case.dtype) not in str(error) or placed.wrong(values))
            return
        self.tally.count(f"no TypeError for {case}", True)
