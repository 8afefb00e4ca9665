"""Start the ranks of a test as processes and bring back results, exceptions, signals and where each stood.

Nothing here imports torch before a rank asks for it, so that a fresh interpreter gets its environment first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Environment = Mapping[str, "str | None"]
StartMethod = Literal["fork", "spawn"]

_GRACE_S = 5.0  # how long the other ranks may go on after one has failed
_DUMP_LIMIT_S = 2.0
_KILL_LIMIT_S = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PROCESS_TYPES: Mapping[StartMethod, type[BaseProcess]] = {
    "fork": multiprocessing.get_context("fork").Process,
    "spawn": multiprocessing.get_context("spawn").Process,
}


@dataclass(frozen=True)
class RankContext:
    """What a rank knows about itself; first argument of the function that :func:`run_ranks` runs.

    ``directory`` is an empty folder that all ranks of this launch share and that is removed afterwards.
    """

    rank: int
    world_size: int
    directory: Path
    timeout_s: float

    @property
    def init_method(self) -> str:
        """A rendezvous address of this launch alone, for ``init_process_group(init_method=...)``."""
        return f"file://{self.directory / 'init_method'}"

    @property
    def local_rank(self) -> int:
        """Its number on its host, and of its device: ``rank``, unless ``env`` of the launch sets LOCAL_RANK.

        To be read in the rank's own process.
        """
        return int(os.environ["LOCAL_RANK"])

    @property
    def note_path(self) -> Path:
        return self.directory / f".note-{self.rank}"

    def note(self, text: str) -> None:
        """Say what this rank is doing now; it stands in the error if the rank hangs or dies."""
        self.note_path.write_text(text)

    def store(self, name: str) -> Store:
        """Open the key-value store ``name``, which the ranks of this launch share and nobody else."""
        from torch._C._distributed_c10d import FileStore

        store = FileStore(str(self.directory / f"store-{name}"), self.world_size)
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return store


class FailureKind(Enum):
    """How a rank failed."""

    RAISED = "raised"
    EXITED = "exited without a result"
    KILLED = "was ended by a signal"
    TIMED_OUT = "was still running at the time limit"
    LEFT_WAITING = "was still running after another rank had failed"
    SURVIVED = "should have been killed and was not"


@dataclass(frozen=True)
class RankFailure:
    """One rank's failure: ``error_type`` is the class name of what it raised, ``text`` the whole story."""

    rank: int
    kind: FailureKind
    text: str
    error_type: str | None = None


class RanksFailed(Exception):  # noqa: N818 - it says which ranks; "RanksFailedError" would add nothing
    """At least one rank failed; the text lists every failed rank with its traceback or stack."""

    def __init__(self, world_size: int, failures: Sequence[RankFailure], results: Sequence[Any]) -> None:
        self.failures = tuple(failures)
        self.results = tuple(results)
        names = ", ".join(str(failure.rank) for failure in failures)
        head = f"{len(failures)} of {world_size} ranks failed: {names}"
        super().__init__("\n\n".join([head, *(failure.text for failure in failures)]))


@dataclass(frozen=True)
class _Task:
    """What a rank's process is given; ``call`` is pickled for a fresh interpreter and as it is for a fork."""

    call: bytes | tuple[Callable[..., Any], tuple[Any, ...]]
    env: Environment
    gloo: bool
    context: RankContext
    parent_pid: int

    @property
    def outcome_path(self) -> Path:
        return self.context.directory / f".outcome-{self.context.rank}"

    @property
    def stack_path(self) -> Path:
        return self.context.directory / f".stack-{self.context.rank}"


@dataclass(frozen=True)
class _Outcome:
    """What a rank leaves behind: a result, or an error's class name and traceback."""

    result: Any = None
    error_type: str | None = None
    text: str | None = None


# --- in the rank's process ---


def _apply_environment(task: _Task) -> None:
    context = task.context
    defaults = {
        "RANK": str(context.rank),
        "LOCAL_RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_WORLD_SIZE": str(context.world_size),
        "GLOO_SOCKET_IFNAME": "lo",  # host names may not resolve; ranks are processes of one machine
        "OMP_NUM_THREADS": "1",
    }
    for name, value in {**defaults, **task.env}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if "torch" in sys.modules:  # a fork does not inherit the threads that OpenMP's pool believes it has
        sys.modules["torch"].set_num_threads(1)


def _end_with_parent(parent_pid: int) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


@contextlib.contextmanager
def _gloo_group(context: RankContext) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=context.store("gloo"),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=context.timeout_s),
    )
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _write_outcome(task: _Task, outcome: _Outcome) -> None:
    partial = task.outcome_path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(outcome))  # not multiprocessing's pickler: tensors travel by value
    partial.rename(task.outcome_path)


def _rank_main(task: _Task) -> None:
    """Run one rank; the process's exit code says whether it went well, the outcome file what came of it."""
    gc.freeze()  # a collection would write to every page that a fork shares with its parent, for a tenth of a second
    _end_with_parent(task.parent_pid)
    with task.stack_path.open("w") as stacks:
        faulthandler.enable(stacks, all_threads=True)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        _apply_environment(task)
        _forget_backends()
        try:
            function, args = pickle.loads(task.call) if isinstance(task.call, bytes) else task.call
            with _gloo_group(task.context) if task.gloo else contextlib.nullcontext():
                result = function(task.context, *args)
            _write_outcome(task, _Outcome(result=result))
        except SystemExit:
            raise
        except BaseException as error:  # pytest's own failures are no Exceptions
            _write_outcome(task, _Outcome(error_type=type(error).__name__, text=traceback.format_exc()))
            raise SystemExit(1) from error
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.disable()


def _forget_backends() -> None:
    """What the parent of a forked rank has discovered was in its own environment."""
    discovery = sys.modules.get("sglang_fl.comm.discovery")
    if discovery is not None:
        discovery.discover_backends.cache_clear()


# --- in the parent ---


def _await_end_of_group(group: int) -> None:
    """A process that is killed is not gone at once; one that nobody reaps stays as a zombie."""
    until_s = time.monotonic() + _KILL_LIMIT_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until_s:
            os.killpg(group, 0)
            if not any(_runs_in(group, stat) for stat in Path("/proc").glob("[0-9]*/stat")):
                return
            time.sleep(0.001)


def _runs_in(group: int, stat: Path) -> bool:
    try:
        state, _, own_group = stat.read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(own_group) == group and state not in "ZX"


class _RankProcess:
    """The parent's hold on one rank: its process, a descriptor that tells when it ends, and its files."""

    def __init__(self, task: _Task, start_method: StartMethod) -> None:
        self.task = task
        self.rank = task.context.rank
        self.process = _PROCESS_TYPES[start_method](target=_rank_main, args=(task,), name=f"rank {self.rank}")
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.descriptor = os.pidfd_open(self.pid)

    def end(self) -> None:
        """Kill the process and everything in its process group, and reap it; may be called again."""
        if self.descriptor < 0:
            return
        # multiprocessing may have reaped it, when the next rank was started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)
        self.process.join()
        _await_end_of_group(self.pid)
        os.close(self.descriptor)
        self.descriptor = -1

    def outcome(self) -> _Outcome | None:
        if not self.task.outcome_path.exists():
            return None
        outcome = pickle.loads(self.task.outcome_path.read_bytes())
        assert isinstance(outcome, _Outcome)
        return outcome

    def last_note(self) -> str:
        path = self.task.context.note_path
        return f"its last note: {path.read_text()}\n" if path.exists() else ""

    def last_words(self) -> str:
        """The rank's last note and the Python stacks of its threads, as far as it could write them."""
        stack = self.task.stack_path.read_text() if self.task.stack_path.exists() else ""
        return self.last_note() + (stack.strip() or "(no Python stack was written)")

    def request_stack(self) -> None:
        self._signal(signal.SIGUSR1)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)

    def has_written_stack(self) -> bool:
        path = self.task.stack_path
        return path.exists() and path.stat().st_size > 0


def _failure_after_end(process: _RankProcess, expect_killed: bool) -> RankFailure | None:
    """Judge a rank that ended by itself."""
    rank, outcome, code = process.rank, process.outcome(), process.process.exitcode
    assert code is not None
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "signal"
        if expect_killed and -code == signal.SIGKILL:
            return None
        when = " after it had returned its result" if outcome and outcome.text is None else ""
        text = f"rank {rank} was ended by {name} ({-code}){when}\n{process.last_words()}"
        return RankFailure(rank, FailureKind.KILLED, text)
    if outcome is not None and outcome.text is not None:
        text = f"rank {rank} raised\n{process.last_note()}{outcome.text.rstrip()}"
        return RankFailure(rank, FailureKind.RAISED, text, outcome.error_type)
    if expect_killed:
        text = f"rank {rank} should have been ended by SIGKILL, it exited with code {code}"
        return RankFailure(rank, FailureKind.SURVIVED, text)
    if outcome is None or code != 0:
        what = "without a result" if outcome is None else "after it had returned its result"
        return RankFailure(rank, FailureKind.EXITED, f"rank {rank} exited with code {code} {what}")
    return None


def _failures_of_hung(hung: Sequence[_RankProcess], limit_s: float, after_failure: bool) -> list[RankFailure]:
    """Ask the ranks that still run where they stand, and kill them."""
    for process in hung:
        process.request_stack()
    until = time.monotonic() + _DUMP_LIMIT_S
    while time.monotonic() < until and not all(process.has_written_stack() for process in hung):
        time.sleep(0.01)
    time.sleep(0.1)  # a stack is written in pieces
    for process in hung:
        process.end()
    kind, when = FailureKind.TIMED_OUT, f"at the limit of {limit_s:g} s"
    if after_failure:
        kind, when = FailureKind.LEFT_WAITING, f"{_GRACE_S:g} s after another rank had failed"
    return [
        RankFailure(
            process.rank,
            kind,
            f"rank {process.rank} was still running {when}; it stood at\n{process.last_words()}",
        )
        for process in hung
    ]


def _supervise(
    processes: Sequence[_RankProcess], timeout_s: float, expect_killed: Collection[int]
) -> list[RankFailure]:
    """Wait for all ranks; return the failures, in the order of the ranks."""
    running = {process.descriptor: process for process in processes}
    failures: list[RankFailure] = []
    deadline = time.monotonic() + timeout_s
    while running:
        ready, _, _ = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            failures += _failures_of_hung(list(running.values()), timeout_s, after_failure=bool(failures))
            break
        for descriptor in ready:
            process = running.pop(descriptor)
            process.end()
            failure = _failure_after_end(process, process.rank in expect_killed)
            if failure is not None:
                failures.append(failure)
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return sorted(failures, key=lambda failure: failure.rank)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 180.0,
    gloo: bool = True,
    env: Environment | Callable[[int], Environment] | None = None,
    start_method: StartMethod = "fork",
    expect_killed: Collection[int] = (),
) -> list[Any]:
    """Run ``function(context, *args)`` in ``world_size`` processes and return the results in rank order.

    ``fork`` (tens of milliseconds) takes any function and whatever the caller has imported; ``spawn`` starts
    fresh interpreters, as CUDA needs, and takes what can be pickled. Results are pickled: tensors by value.
    With ``gloo`` the default process group is a gloo group over the loopback interface, destroyed after the
    function has returned. ``env``, a mapping or a function from rank to mapping, is set in the rank on top of
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GLOO_SOCKET_IFNAME=lo and OMP_NUM_THREADS=1; None unsets.
    Ranks in ``expect_killed`` must end by SIGKILL; their result is None.

    After ``timeout_s``, or five seconds after a rank has failed, the ranks that still run are asked for the
    Python stacks of all their threads and killed. No process of a rank's process group outlives this call,
    nor the calling process.

    Raises :class:`RanksFailed`, whose text has every failed rank's traceback, stack, exit code or signal.
    """
    call = pickle.dumps((function, args)) if start_method == "spawn" else (function, args)
    processes: list[_RankProcess] = []
    with tempfile.TemporaryDirectory(prefix="sglang_fl-ranks-") as folder, warnings.catch_warnings():
        # Python 3.12 warns of a fork beside other threads; a rank touches none of their locks.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        try:
            for rank in range(world_size):
                context = RankContext(rank, world_size, Path(folder), timeout_s)
                rank_env = (env(rank) if callable(env) else env) or {}
                task = _Task(call, rank_env, gloo, context, os.getpid())
                processes.append(_RankProcess(task, start_method))
            failures = _supervise(processes, timeout_s, expect_killed)
            outcomes = [process.outcome() for process in processes]
        finally:
            for process in processes:
                process.end()
    results = [outcome.result if outcome else None for outcome in outcomes]
    if failures:
        raise RanksFailed(world_size, failures, results)
    return results
