"""What each rank of a case does, until the fault."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from sglang_fl.comm.backends.flagcx import FlagCXCommunicator
from sglang_fl.comm.backends.flagcx.channels import _ID_TAG
from sglang_fl.comm.backends.torch_dist import TorchBackend
from sglang_fl.comm.communicator import CommunicatorFL
from tests.faults.cases import CREATION_LIMIT_S, LARGE, LIMIT_S, Case, Fault, Point

_FLOAT32 = 7  # flagcx.h
_RENDEZVOUS_LIMIT_S = 60.0
_TRAPPED = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "reduce",
    "gather",
    "broadcast",
    "all_gather",
    "reduce_scatter",
)


class Planted(Exception):  # noqa: N818 - what a rank raises here is no error of the program
    """The exception of one rank."""


class Rank:
    """One rank of a case."""

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self.case = case
        self.rank = rank
        self.folder = folder
        self.is_victim = rank == case.victim
        self._in_call = False

    def run(self) -> None:
        """Live until the fault; returns only if nothing has happened to anybody."""
        self._connect()
        if self.case.backend == "flagcx":
            _trap_torch()
        if self.case.point.is_creation:
            self._get_ready()
        if self._suffers(Point.BEFORE_CREATION):
            self.strike()
        if self._suffers(Point.DURING_CREATION):
            self._plant_in_creation()
        communicator = CommunicatorFL(
            cpu_group=dist.group.WORLD,
            device_group=dist.group.WORLD,
            device="cpu",
            ranks=range(self.case.size),
            name="tp:0",
            timeout_s=CREATION_LIMIT_S if self.case.point.is_creation else _RENDEZVOUS_LIMIT_S,
            operation_timeout_s=LIMIT_S,
        )
        assert communicator.backend == self.case.backend
        assert communicator.exceptions() == {}
        for _ in range(3):
            self._reduce(communicator, 1024)
        self._get_ready()
        _POINTS[self.case.point](self, communicator)

    def strike(self) -> None:
        """The fault."""
        (self.folder / "struck").write_text(repr(time.monotonic()))
        if self.case.fault is Fault.RAISE:
            raise Planted("planted")
        os.kill(os.getpid(), signal.SIGKILL if self.case.fault is Fault.KILL else signal.SIGSTOP)

    def in_all_reduce(self, communicator: CommunicatorFL) -> None:
        if self.is_victim:
            if self.case.fault is Fault.RAISE:
                # What a signal's handler raises comes out of the library's call.
                signal.signal(signal.SIGUSR2, lambda *_: self.strike())
                self._when_in_call(lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2))
            else:
                self._when_in_call(self.strike)
        for _ in range(400):
            self._reduce(communicator, LARGE)

    def between_calls(self, communicator: CommunicatorFL) -> None:
        if self.is_victim:
            self.strike()
        self._reduce(communicator, 5)

    def in_group(self, communicator: CommunicatorFL) -> None:
        below: Any = communicator.agreed.transport
        flagcx: FlagCXCommunicator = below.communicator
        ours, theirs = torch.full((9,), float(self.rank)), torch.empty(9)
        size = self.case.size
        for turn in range(2):
            with flagcx.group():
                flagcx.send(ours.data_ptr(), 9, _FLOAT32, (self.rank + 1) % size)
                if turn and self.is_victim:
                    self.strike()
                flagcx.recv(theirs.data_ptr(), 9, _FLOAT32, (self.rank - 1) % size)
            assert theirs.tolist() == [(self.rank - 1) % size] * 9
        # In a larger ring those that are not the neighbours have been served.
        self._reduce(communicator, 3)

    def in_transfer(self, communicator: CommunicatorFL) -> None:
        victim, receiver = self.case.victim, self.case.receiver
        for turn in range(2):
            if self.is_victim:
                if turn:
                    self.strike()
                communicator.send(torch.full((7,), 3.0), dst=receiver)
                communicator.recv(torch.Size([1]), torch.float32, src=receiver)
            elif self.rank == receiver:
                assert communicator.recv(torch.Size([7]), torch.float32, src=victim).tolist() == [3.0] * 7
                communicator.send(torch.ones(1), dst=victim)
        self._reduce(communicator, 3)

    def _suffers(self, point: Point) -> bool:
        return self.is_victim and self.case.point is point

    def _connect(self) -> None:
        """As SGLang does, with the store in rank 0; the port is the system's choice."""
        place, limit = self.folder / "port", timedelta(seconds=_RENDEZVOUS_LIMIT_S)
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
            place.with_suffix(".partial").write_text(str(store.port))
            place.with_suffix(".partial").rename(place)
        else:
            self._wait_for(["port"])
            store = dist.TCPStore("127.0.0.1", int(place.read_text()), is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.case.size)

    def _get_ready(self) -> None:
        """Wait until all ranks of all cases have come so far: what starting takes is no part of any limit."""
        (self.folder / f"ready-{self.rank}").touch()
        self._wait_for(["go"])

    def _wait_for(self, names: list[str]) -> None:
        until_s = time.monotonic() + _RENDEZVOUS_LIMIT_S
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < until_s, f"{names} did not come"
            time.sleep(0.005)

    def _plant_in_creation(self) -> None:
        def instead(*_: object, **__: object) -> NoReturn:
            self.strike()
            sys.exit("a stopped rank was continued")

        owner: type = FlagCXCommunicator if self.case.backend == "flagcx" else TorchBackend
        setattr(owner, "create", instead)  # noqa: B010 - a method is replaced

    def _reduce(self, communicator: CommunicatorFL, count: int) -> None:
        """One checked all_reduce: a value that a rank has not contributed to is an AssertionError."""
        tensor = torch.full((count,), float(self.rank + 1))
        with self._call():
            communicator.all_reduce(tensor)
        total = self.case.size * (self.case.size + 1) / 2
        assert bool((tensor == total).all()), f"all_reduce gave {tensor[:3].tolist()}, not {total}"

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        self._in_call = True
        yield
        self._in_call = False

    def _when_in_call(self, act: Callable[[], None]) -> None:
        def run() -> None:
            while True:
                if self._in_call:
                    time.sleep(0.005)
                    if self._in_call:
                        act()
                        return
                time.sleep(0.001)

        threading.Thread(target=run, daemon=True).start()


_POINTS: dict[Point, Callable[[Rank, CommunicatorFL], None]] = {
    Point.IN_ALL_REDUCE: Rank.in_all_reduce,
    Point.BETWEEN_CALLS: Rank.between_calls,
    Point.IN_GROUP: Rank.in_group,
    Point.IN_TRANSFER: Rank.in_transfer,
}


def _trap_torch() -> None:
    """torch's own collectives cannot carry a call for FlagCX; its transfers carry nothing but the id of a pair."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a collective of torch.distributed was called")

    for name in _TRAPPED:
        setattr(dist, name, refuse)
    for name in ("isend", "irecv"):
        setattr(dist, name, _only_ids(getattr(dist, name)))
    for name in ("send", "recv", "batch_isend_irecv"):
        setattr(dist, name, refuse)


def _only_ids(transfer: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*arguments: Any, **named: Any) -> Any:
        assert named.get("tag") == _ID_TAG, "a transfer of torch.distributed was called"
        return transfer(*arguments, **named)

    return checked
