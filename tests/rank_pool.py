"""Ranks that stay for several tests, since fresh ones cost seconds where they begin with CUDA."""

from __future__ import annotations

import faulthandler
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

from torch.distributed import TCPStore

from sglang_fl.testing.ranks import Environment, RankContext, run_ranks

_LIFE_S = 3600.0  # of the ranks, all tests together
_POLL_S = 0.005


class RankPool:
    """``world_size`` processes that run one function after the other; fresh ones after a failure.

    What a function leaves behind in its process is there for the next one: it destroys the groups that it makes.
    """

    def __init__(self, world_size: int, env: Callable[[int], Environment], limit_s: float) -> None:
        """``env``: of the processes, as for :func:`run_ranks`; ``limit_s``: for each function, with its start."""
        self._world_size = world_size
        self._env = env
        self._limit_s = limit_s
        # The thread is there as long as the ranks: they end with the thread that has started them.
        self._thread = ThreadPoolExecutor(1)
        self._ranks: Future[list[Any]] | None = None
        self._store: TCPStore | None = None
        self._tasks: Iterator[int]

    def run(self, function: Callable[..., Any], *arguments: object, env: Mapping[str, str | None]) -> list[Any]:
        """``function(context, *arguments)`` on each rank, under ``env`` on top of the pool's; results in rank order.

        Raises:
            RanksFailed: a rank failed, or was not done in time.
        """
        if self._ranks is None:
            self._ranks = self._start()
        store, number = self._store, next(self._tasks)
        assert store is not None
        store.set(f"task {number}", pickle.dumps((function, arguments, dict(env))))
        names = [_result_name(number, rank) for rank in range(self._world_size)]
        while not store.check(names):
            if self._ranks.done():
                ended, self._ranks = self._ranks, None
                self._store = store = None
                raise ended.exception() or AssertionError("the ranks ended before their task")
            time.sleep(_POLL_S)
        return [pickle.loads(store.get(name)) for name in names]

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None and self._store is not None:
            self._store.set(f"task {next(self._tasks)}", pickle.dumps(None))
            self._ranks.result()
        # It has a thread, for which a process forked later would wait for ever if it collected it as garbage.
        self._store = None
        self._thread.shutdown()

    def _start(self) -> Future[list[Any]]:
        self._tasks = count()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._thread.submit(
            run_ranks,
            _serve,
            self._world_size,
            self._store.port,
            self._limit_s,
            env=self._env,
            start_method="spawn",
            timeout_s=_LIFE_S,
        )


def _result_name(number: int, rank: int) -> str:
    return f"result {number} of {rank}"


def _serve(context: RankContext, port: int, limit_s: float) -> None:
    """One rank: tasks until there is None; what one raises ends the rank."""
    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=_LIFE_S))
    for number in count():
        task = pickle.loads(store.get(f"task {number}"))
        if task is None:
            return
        function, arguments, environment = task
        faulthandler.dump_traceback_later(limit_s, exit=True)
        with _under(environment):
            result = function(context, *arguments)
        faulthandler.cancel_dump_traceback_later()
        store.set(_result_name(number, context.rank), pickle.dumps(result))


@contextmanager
def _under(environment: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    _change(environment)
    yield
    _change(before)


def _change(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
