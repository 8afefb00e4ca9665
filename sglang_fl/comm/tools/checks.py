"""The table of what the self-test runs: each line of its output, and the methods of CommunicatorFL behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_fl.comm.tools import checks_gathers, checks_reductions, checks_transfers
from sglang_fl.comm.tools.scope import Scope


@dataclass(frozen=True)
class Check:
    """One line: its name, the methods that it covers, and the function that tries them."""

    name: str
    methods: tuple[str, ...]
    run: Callable[[Scope], None]


def _one(name: str, run: Callable[[Scope], None]) -> Check:
    return Check(name, (name,), run)


CHECKS: tuple[Check, ...] = (
    _one("all_reduce", checks_reductions.all_reduce),
    _one("all_reduce_in_place", checks_reductions.all_reduce_in_place),
    _one("all_reduce_new", checks_reductions.all_reduce_new),
    _one("quant_all_reduce", checks_reductions.quant_all_reduce),
    _one("fused_allreduce_rmsnorm", checks_reductions.fused_allreduce_rmsnorm),
    _one("reduce_scatter_tensor", checks_reductions.reduce_scatter_tensor),
    _one("reduce_scatter", checks_reductions.reduce_scatter),
    _one("reduce_scatterv", checks_reductions.reduce_scatterv),
    _one("all_gather", checks_gathers.all_gather),
    Check("all_gather into a list", ("all_gather",), checks_gathers.all_gather_list),
    _one("all_gather_into_tensor", checks_gathers.all_gather_into_tensor),
    _one("cp_all_gather_into_tensor_async", checks_gathers.cp_all_gather_into_tensor_async),
    _one("all_gatherv", checks_gathers.all_gatherv),
    _one("gather", checks_gathers.gather),
    _one("broadcast", checks_transfers.broadcast),
    _one("broadcast_object_list", checks_transfers.broadcast_object_list),
    _one("broadcast_tensor_dict", checks_transfers.broadcast_tensor_dict),
    Check("send, recv", ("send", "recv"), checks_transfers.send_and_recv),
    Check(
        "send_tensor_dict, recv_tensor_dict",
        ("send_tensor_dict", "recv_tensor_dict"),
        checks_transfers.send_and_recv_tensor_dict,
    ),
    _one("barrier", checks_transfers.barrier),
    _one("graph_capture", checks_transfers.graph_capture),
)
