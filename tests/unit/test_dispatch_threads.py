"""Registering, binding and calling from several threads at once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sglang_fl.dispatch import (
    OpManager,
    OpRegistry,
    RegistrationError,
    SelectionPolicy,
    call_op,
    get_manager,
    manager,
    policy_context,
    set_manager,
)
from tests.unit.dispatch_cases import Counted, manager_of

THREADS = 8
ROUNDS = 200


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Let threads interrupt each other as often as Python can; afterwards the process has its own manager again."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
    set_manager(None)


def together(work: Callable[[int], None]) -> None:
    """Run ``work(number)`` in all threads, which start at the same moment."""
    start = threading.Barrier(THREADS)

    def run(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))


def test_nothing_that_threads_register_is_lost() -> None:
    """Given 8 threads that register for the same operator, when all are done, then everything is there, once."""
    registry = OpRegistry()

    def register(number: int) -> None:
        for index in range(ROUNDS):
            registry.register_impl(Counted(f"vendor.chip{number}_{index}").impl)

    together(register)
    found = [impl.impl_id for impl in registry.implementations("silu_and_mul")]
    assert len(found) == len(set(found)) == THREADS * ROUNDS


def test_of_equal_registrations_exactly_one_succeeds() -> None:
    """Given 8 threads that register the same two implementations, then one has both, and seven get an error."""
    registry = OpRegistry()
    outcomes: list[str] = []

    def register(_: int) -> None:
        pair = [Counted("flagos").impl, Counted("reference").impl]
        try:
            registry.register_many(pair)
            outcomes.append("registered")
        except RegistrationError:
            outcomes.append("refused")

    together(register)
    assert sorted(outcomes) == ["refused"] * (THREADS - 1) + ["registered"]
    assert len(registry.implementations("silu_and_mul")) == 2


def test_binding_while_others_register_is_right_at_every_moment() -> None:
    """Given threads that bind and call while others register better ones, then each call gets a whole choice, and
    afterwards the best one."""
    first = Counted("reference")
    operators = manager_of(first, policy=SelectionPolicy(prefer="vendor"))
    set_manager(operators)

    def work(number: int) -> None:
        for index in range(ROUNDS // 4):
            if number % 2:
                better = Counted(f"vendor.chip{number}_{index}").impl
                operators.registry.register_impl(replace(better, priority=index * THREADS + number))
            assert operators.bind("silu_and_mul", object()).fn(None)
            assert call_op("silu_and_mul", None)

    together(work)
    best = f"vendor.chip{THREADS - 1}_{ROUNDS // 4 - 1}"
    assert operators.bind("silu_and_mul", object()).impl.impl_id == best
    assert call_op("silu_and_mul", None) == best


def test_threads_with_policies_of_their_own_do_not_mix() -> None:
    """Given 8 threads that enter and leave policies in turn, then each call has the choice of its own thread."""
    set_manager(manager_of(*(Counted(f"vendor.chip{number}") for number in range(THREADS)), Counted("reference")))

    def work(number: int) -> None:
        own = SelectionPolicy(per_op_order={"silu_and_mul": (f"vendor:chip{number}",)})
        for _ in range(ROUNDS):
            with policy_context(own):
                assert call_op("silu_and_mul", None) == f"vendor.chip{number}"
            with policy_context(SelectionPolicy(prefer="reference")):
                assert call_op("silu_and_mul", None) == "reference"

    together(work)


def test_the_process_has_one_manager_whoever_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given 8 threads that ask for the manager at once, then it was made once, and all have the same."""
    made: list[OpManager] = []

    def make() -> OpManager:
        made.append(OpManager(OpRegistry()))
        time.sleep(0.05)  # as long as backends take to register, so that the others come meanwhile
        return made[-1]

    monkeypatch.setattr(manager, "OpManager", make)
    set_manager(None)
    found: list[OpManager] = []
    together(lambda _: found.append(get_manager()))
    assert len(made) == 1
    assert all(each is made[0] for each in found)


def test_a_backend_that_asks_for_the_manager_while_it_registers_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a backend that calls an operator while it registers, then an error says so, and no endless loop."""
    monkeypatch.setattr(manager, "OpManager", get_manager)
    set_manager(None)
    with pytest.raises(RuntimeError, match="while it was registering"):
        get_manager()
