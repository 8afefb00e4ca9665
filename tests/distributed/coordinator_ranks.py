"""Run as a program: real SGLang groups over gloo in forked ranks, with and without the plugin; prints JSON.

A program of its own, because SGLang decides while it is imported which device it is on, and hooks its classes once.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

import pytest
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.entrypoints import engine
from sglang.srt.managers import scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from sglang_fl import plugin
from sglang_fl.comm.errors import AgreementError
from sglang_fl.testing.ranks import Environment, RankContext, RanksFailed, run_ranks
from tests.distributed.coordinator_cases import CASES, NOT_CALLED, described, plain

# Without the plugin, PyNccl would load the libnccl that a CUDA build of torch brings and reject the CPU.
CONTROL = {"SGLANG_PLUGINS": "__none__", "SGLANG_NCCL_SO_PATH": "/nonexistent"}
MARK = "RESULT "
IMPORTED = (engine, scheduler)  # before the ranks are forked, or each would import what the hooks' targets need


def _methods() -> dict[str, Any]:
    members = vars(parallel_state.GroupCoordinator).items()
    return {name: value for name, value in members if inspect.isfunction(value)}


def _load_plugins() -> None:
    """As in a process of its own with this environment: the one that was forked has read its settings already."""
    plugin._plugin = None
    load_plugins()


def _make_groups(context: RankContext) -> None:
    """As SGLang does: plugins, arguments, the world, then the groups of the model at tp = world size."""
    if plugin._plugin is None or not plugin._loaded:
        _load_plugins()
    ServerArgs(model_path="dummy")
    parallel_state.init_distributed_environment(
        world_size=context.world_size,
        rank=context.rank,
        local_rank=context.rank,
        distributed_init_method=context.init_method,
        backend="gloo",
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=context.world_size, backend="gloo")


def _call_all(context: RankContext) -> dict[str, Any]:
    """Case to what came of it: the returned value and every argument afterwards, or the error's type."""
    _make_groups(context)
    group = parallel_state.get_tp_group()
    communicator = getattr(group, "fl_communicator", None)
    backend = None if communicator is None else communicator.backend
    found: dict[str, Any] = {}
    for case in CASES:
        context.note(case.name)
        call = case.call(context.rank)
        names = list(inspect.signature(getattr(group, call.method)).parameters)
        assert names == list(call.arguments), (case.name, names)
        try:
            returned = getattr(group, call.method)(**call.arguments)
        except (AttributeError, NotImplementedError, RuntimeError, AssertionError) as error:
            found[case.name] = {"error": type(error).__name__, "text": str(error)}
            continue
        result = described(returned, call.arguments)
        found[case.name] = {"returned": result, **{name: plain(value) for name, value in call.arguments.items()}}
    found["carried by"] = backend
    parallel_state.destroy_distributed_environment()
    return found


def _expected(rank: int) -> dict[str, Any]:
    return {case.name: plain(case.expected(rank)) for case in CASES if case.expected is not None}


def calls() -> dict[str, Any]:
    """Every method with and without the plugin, what is expected of some, and which names there are."""
    return {
        "names": sorted(_methods()),
        "called": sorted({case.call(rank).method for case in CASES for rank in range(2)} | set(NOT_CALLED)),
        "plugin": run_ranks(_call_all, 2, gloo=False),
        "native": run_ranks(_call_all, 2, gloo=False, env=CONTROL),
        "expected": [_expected(rank) for rank in range(2)],
    }


def _backends(context: RankContext) -> dict[str, Any]:
    _make_groups(context)
    assert plugin._plugin is not None and plugin._plugin.groups is not None
    records = plugin._plugin.groups.records
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    return {record.name: {"backend": record.choice, "reasons": list(record.reasons)} for record in records}


def selection(environments: Mapping[str, Environment]) -> dict[str, Any]:
    """For each environment what both ranks report of their groups, or the text of how they failed."""
    found: dict[str, Any] = {}
    for name, environment in environments.items():
        try:
            found[name] = run_ranks(_backends, 2, gloo=False, env=environment)
        except RanksFailed as failed:
            found[name] = str(failed)
    return found


def _carried() -> dict[str, dict[str, int]]:
    """Operation to backend to calls, of the tensor-parallel group."""
    assert plugin._plugin is not None and plugin._plugin.groups is not None
    found: dict[str, dict[str, int]] = {}
    for row in plugin._plugin.groups.status()["clock"]["carried"]:
        if row["group"].startswith("tp:"):
            found.setdefault(row["operation"], {})[row["backend"]] = row["calls"]
    return found


def _by_size(context: RankContext) -> dict[str, Any]:
    """Small and large calls of the operations that have routes, eager and from a graph that Dynamo traced."""
    _make_groups(context)
    group, rank, found = parallel_state.get_tp_group(), context.rank, {}
    for elements in (16, 4096):
        mine = torch.full((elements,), rank + 1.0)
        assert group.all_reduce(mine.clone()).unique().item() == 3.0
        in_place = mine.clone()
        group._all_reduce_in_place(in_place)
        assert in_place.unique().item() == 3.0
        assert group.all_reduce(mine.to(torch.int32)).unique().item() == 3
        both = torch.cat([torch.full((elements,), 1.0), torch.full((elements,), 2.0)])
        assert torch.equal(group.all_gather(mine, 0), both)
        share = torch.empty(elements // 2)
        group.reduce_scatter_tensor(share, mine)
        assert share.unique().item() == 3.0
    found["eager"] = _carried()
    _in_two_threads(group)
    with pytest.raises(ZeroDivisionError):
        _through_native(group, lambda: 1 / 0)
    assert group.fl_communicator is not None and not group.fl_native_threads
    found["routes"] = list(group.fl_communicator.routes)
    parallel_state.destroy_distributed_environment()
    return found


def _through_native(group: Any, inside: Callable[[], object]) -> None:
    """One small all_reduce, during whose way through SGLang's own method ``inside`` is called."""
    # SGLang's own all_reduce of a CPU tensor ends there.
    real, torch.distributed.all_reduce = torch.distributed.all_reduce, lambda *_, **__: inside()
    try:
        group.all_reduce(torch.ones(2))
    finally:
        torch.distributed.all_reduce = real


def _in_two_threads(group: Any) -> None:
    """A second thread that calls the group while the first is inside SGLang's own method is not led past ours."""
    seen = []

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: seen.append(get_ident() in group.fl_native_threads))
        thread.start()
        thread.join()
        seen.append(get_ident() in group.fl_native_threads)

    _through_native(group, elsewhere)
    assert seen == [False, True], seen


def _traced(context: RankContext) -> dict[str, Any]:
    """A function that Dynamo must trace whole: values, and what carried them."""
    _make_groups(context)
    group, rank = parallel_state.get_tp_group(), context.rank

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        reduced = group.all_reduce(x * 2)
        gathered = group.all_gather(reduced + rank, dim=-1)
        share = torch.empty_like(x[: x.shape[0] // 2])
        group.reduce_scatter_tensor(share, x)
        return reduced, gathered, share

    mine = torch.arange(8.0).view(4, 2) + rank
    eager = [plain(value) for value in model(mine.clone())]
    eager_calls = _carried()
    parts = [torch.empty(4, 2) for _ in range(2)]
    listed = torch.compile(lambda x: group.all_gather(x, output_tensor_list=parts), fullgraph=True, backend="eager")
    assert listed(mine) is None and parts[1 - rank].tolist() == (torch.arange(8.0).view(4, 2) + 1 - rank).tolist()
    wrong = torch.compile(lambda x: group.all_gather(x, dim=5), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="dim=5 is none of the dimensions"):
        wrong(mine)
    before = _carried()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    kept = mine.clone()
    traced = [plain(value) for value in compiled(mine)]
    parallel_state.destroy_distributed_environment()
    return {
        "eager": eager,
        "traced": traced,
        "kept": torch.equal(kept, mine),
        "eager calls": eager_calls,
        "before": before,
        "after": _carried(),
    }


def _other_operators(context: RankContext) -> dict[str, Any]:
    """A rank whose machine has another implementation of an operator: what is logged, or the error."""
    _load_plugins()
    assert plugin._plugin is not None and plugin._plugin.groups is not None
    plugin._plugin.groups.operator_choices = lambda: {"rms_norm": ("flagos", "reference")[context.rank]}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang_fl").addHandler(handler)
    try:
        _make_groups(context)
    except AgreementError as error:
        return {"error": str(error), "warnings": []}
    parallel_state.destroy_distributed_environment()
    return {"error": "", "warnings": [line for line in lines if "rounded differently" in line]}


def other_operators(environment: Environment) -> list[dict[str, Any]]:
    """What ranks with different implementations say."""
    return run_ranks(_other_operators, 2, gloo=False, env=environment)


def by_size(environment: Environment) -> list[dict[str, Any]]:
    """What carried which size with these settings, per rank."""
    return run_ranks(_by_size, 2, gloo=False, env=environment)


def traced(environment: Environment) -> list[dict[str, Any]]:
    """What a traced function gave, per rank."""
    return run_ranks(_traced, 2, gloo=False, env=environment)


def _hooked(context: RankContext) -> list[str]:
    import sglang_fl.plugin

    # A stand-in for a device that this machine may lack: only what is hooked is looked at, no tensor is made on it.
    sglang_fl.plugin.is_present = lambda platform: True
    before = _methods()
    _load_plugins()
    return sorted(name for name, function in _methods().items() if function is not before[name])


def hooked(environments: Mapping[str, Environment]) -> dict[str, Any]:
    """For each environment the methods of GroupCoordinator that SGLang's plugins changed."""
    return {name: run_ranks(_hooked, 1, gloo=False, env=env)[0] for name, env in environments.items()}


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    answer = {
        "calls": calls() if request.get("calls") else {},
        "selection": selection(request.get("selection", {})),
        "hooked": hooked(request.get("hooked", {})),
        "other_operators": {name: other_operators(env) for name, env in request.get("other_operators", {}).items()},
        "by_size": {name: by_size(env) for name, env in request.get("by_size", {}).items()},
        "traced": {name: traced(env) for name, env in request.get("traced", {}).items()},
    }
    print(MARK + json.dumps(answer))
