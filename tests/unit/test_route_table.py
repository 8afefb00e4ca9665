"""The look-up of a call's route: the first route that holds for its dtype, size and capture."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_fl.comm.route_table import ANY_SIZE, Entries, Table, orders_for, table_of
from sglang_fl.comm.types import Capabilities, Operation
from sglang_fl.config import load_settings

SEED = 3
DTYPES = (torch.float32, torch.bfloat16, torch.int32)
OTHER: Any = SimpleNamespace(name="other")
TRANSPORTS: list[Any] = [SimpleNamespace(name=name) for name in "abc"]


def first_that_holds(entries: Entries, size: int) -> Any:
    """By the rule's words."""
    return next(transport for most, transport in entries if size <= most)


@pytest.mark.parametrize("is_capturing", [False, True])
def test_the_first_route_that_holds_is_taken(is_capturing: bool) -> None:
    """Given random routes, also with limits that do not rise, when tensors of many sizes are looked up outside of a
    capture or inside, then each gets the first route that holds; dtypes without routes get the other one."""
    chance = random.Random(SEED)
    for _ in range(50):

        def entries() -> Entries:
            limited = [(8 * chance.randrange(1, 6), chance.choice(TRANSPORTS)) for _ in range(chance.randrange(4))]
            return (*limited, (ANY_SIZE, chance.choice(TRANSPORTS)))

        eager = {dtype: entries() for dtype in DTYPES[:2]}
        graph = eager if chance.random() < 0.3 else {dtype: entries() for dtype in DTYPES[:2]}
        find = Table(OTHER, eager, graph).finder(lambda: is_capturing)
        for dtype in DTYPES:
            for count in range(14):
                tensor = torch.empty(count, dtype=dtype)
                wanted = (graph if is_capturing else eager).get(dtype)
                expected = OTHER if wanted is None else first_that_holds(wanted, tensor.nbytes)
                assert find(tensor) is expected, (SEED, eager, graph, dtype, count)


def test_a_capture_is_asked_about_only_where_it_makes_a_difference() -> None:
    """Given routes that differ in a capture beyond 16 bytes, then smaller calls and other dtypes do not ask."""
    asked = []
    a, b, c = TRANSPORTS
    common = (16, a)
    table = Table(OTHER, {torch.float32: (common, (ANY_SIZE, b))}, {torch.float32: (common, (ANY_SIZE, c))})
    find = table.finder(lambda: asked.append(1) is None)
    assert find(torch.empty(4)) is a and find(torch.empty(4, dtype=torch.int32)) is OTHER and asked == []
    assert find(torch.empty(5)) is c and asked == [1]


KIB, MIB = 2**10, 2**20
SIZES = (KIB, MIB, MIB + 8, 8 * MIB, 8 * MIB + 8, 16 * MIB, 16 * MIB + 8)
SUMS = Capabilities(frozenset({Operation.ALL_REDUCE}), frozenset({torch.bfloat16}), frozenset(), frozenset({"cuda"}))
SYMMETRIC = ("symm_pull", "symm_push", "symm_two_shot")
ALL = ("native", *SYMMETRIC)


def carried(ranks: int, names: tuple[str, ...], is_capturing: bool, is_registered: bool) -> str:
    """What carries calls of ``SIZES`` by NVIDIA's routes, where there are only the transports ``names`` and flagcx."""
    transports: Any = {name: SimpleNamespace(name=name, capabilities=SUMS) for name in (*names, "flagcx")}
    (order,) = orders_for(ranks, load_settings({}, platform="cuda").comm.routes)
    memory: Any = SimpleNamespace(spans=((0, 1),), holds=lambda address: is_registered)
    find = table_of(order, transports, transports["flagcx"]).finder(lambda: is_capturing, memory)
    return " ".join(find(torch.empty(size // 2, dtype=torch.bfloat16, device="meta")).name for size in SIZES)


@pytest.mark.parametrize(
    ("ranks", "names", "is_registered", "eager", "graph"),
    [
        (2, ALL, False, "native " * 4 + "symm_pull " * 3, "native " * 2 + "symm_pull " * 5),
        (2, ALL, True, "symm_pull " * 7, "symm_pull " * 7),
        (2, ("native",), False, "native " * 4 + "flagcx " * 3, "native " * 4 + "flagcx " * 3),
        (2, ("native",), True, "flagcx " * 7, "flagcx " * 7),
        (2, SYMMETRIC, False, "symm_pull " * 7, "symm_pull " * 7),
        (3, ALL, False, "native " * 4 + "flagcx " * 3, "native " * 4 + "symm_two_shot " * 2 + "flagcx"),
        (3, ALL, True, "symm_two_shot " * 7, "symm_push " * 2 + "symm_two_shot " * 5),
        (8, ALL, True, "symm_two_shot " * 7, "symm_push " * 2 + "symm_two_shot " * 5),
    ],
)
def test_routes_on_nvidia(ranks: int, names: tuple[str, ...], is_registered: bool, eager: str, graph: str) -> None:
    """Given NVIDIA's routes, when groups of two and of more look sizes up, with symmetric memory and without it, then
    each call takes what the documentation says, and SGLang's methods where symm_pull is left out."""
    assert carried(ranks, names, False, is_registered) == eager.strip()
    assert carried(ranks, names, True, is_registered) == graph.strip()
