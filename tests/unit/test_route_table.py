"""Which transport a call finds, by capture and memory; the sizes and dtypes are tried in tests/distributed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_fl.comm.route_table import NATIVE, table_of
from sglang_fl.comm.types import Capabilities, Operation
from sglang_fl.config.route_type import CommRoutes

BASE = "flagcx"
SMALL, LARGE = 16, 4096  # float32


class StandIn(SimpleNamespace):
    """What of a transport a table looks at."""

    def __init__(self, name: str) -> None:
        dtypes = frozenset({torch.float32})
        super().__init__(
            name=name, capabilities=Capabilities(frozenset({Operation.ALL_REDUCE}), dtypes, dtypes, frozenset())
        )


class StandInMemory:
    """Registered memory that holds one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.spans = ((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes),)

    def holds(self, address: int) -> bool:
        """As the real one."""
        return self.spans[0][0] <= address < self.spans[0][1]


def found(routes: str, is_capturing: bool, is_registered: bool, count: int) -> str:
    """Name of the transport for one float32 tensor."""
    (order,) = CommRoutes().from_text(f"all_reduce={routes}")
    names = {BASE, *(route.backend for route in order.routes)}
    transports: dict[str, Any] = {name: StandIn(name) for name in names}
    tensor = torch.zeros(count)
    memory: Any = StandInMemory(tensor if is_registered else torch.zeros(1))
    return table_of(order, transports, transports[BASE]).finder(lambda: is_capturing, memory)(tensor).name


DEFAULT = "native:8KiB@ordinary|flagcx:1KiB@registered|symm@registered"


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize(
    ("is_registered", "count", "wanted"),
    [(False, SMALL, NATIVE), (False, LARGE, BASE), (True, SMALL, BASE), (True, LARGE, "symm")],
)
def test_memory_decides(is_capturing: bool, is_registered: bool, count: int, wanted: str) -> None:
    """Given routes of both kinds of memory, then a tensor takes those of its own, in a capture and outside."""
    assert found(DEFAULT, is_capturing, is_registered, count) == wanted


@pytest.mark.parametrize("routes", ["native:1KiB|symm", "native@registered|symm"])
def test_a_capture_gives_no_registered_memory_to_sglang(routes: str) -> None:
    """Given a route to SGLang's own methods that fits, then registered memory takes it outside of a capture alone:
    after one SGLang could not hand it to the peers."""
    assert found(routes, False, True, SMALL) == NATIVE
    assert found(routes, True, True, SMALL) == "symm"


@pytest.mark.parametrize(
    ("is_capturing", "is_registered", "wanted"),
    [(True, True, "a"), (True, False, "b"), (False, True, "c"), (False, False, BASE)],
)
def test_both_conditions_together(is_capturing: bool, is_registered: bool, wanted: str) -> None:
    """Given routes with capture and memory rules, then a call takes the first both of whose rules it keeps."""
    routes = "a@graph@registered|b@graph|c@registered"
    assert found(routes, is_capturing, is_registered, SMALL) == wanted


def test_routes_that_do_not_ask_for_memory_do_not_look_at_it() -> None:
    """Given routes without memory rules, then the look-up asks no tensor for its address."""
    (order,) = CommRoutes().from_text("all_reduce=a:1KiB|b")
    transports: dict[str, Any] = {name: StandIn(name) for name in (BASE, "a", "b")}
    assert table_of(order, transports, transports[BASE]).registered is None
