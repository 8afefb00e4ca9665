"""Layer 1 on a GPU: the sweep measures, survives a fault, and the replaced operators give PyTorch's values.

Needs torch, triton and flag_gems; neither SGLang nor this project's native part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_fl.aten.sweep.cases import Case, CaseFile
from sglang_fl.aten.sweep.results import Result, Table

pytestmark = pytest.mark.gpu

_LIMIT_S = 300.0


def tensor(shape: list[int], dtype: str, low: float = -1.0, high: float = 1.0) -> dict[str, object]:
    """A contiguous tensor of the accelerator in a case's notation."""
    stride = list(torch.empty(shape, device="meta").stride())
    data = {"shape": shape, "stride": stride, "dtype": dtype, "device": "accelerator", "low": low, "high": high}
    return {"tensor": data}


CASES = [
    Case("cumsum", [tensor([8, 4096], "float32"), -1], {}, {"decode_8": 1}),
    Case("embedding", [tensor([1000, 896], "bfloat16"), tensor([32], "int64", 0, 999)], {}, {"decode_32": 1}),
    # In place: times come from repeated calls, values from one call on a copy.
    Case("add_.Tensor", [tensor([32, 896], "bfloat16"), tensor([32, 896], "bfloat16")], {}, {"decode_32": 2}),
    # An index beyond the weight ends the device for the process that asks.
    Case("index_select", [tensor([4, 8], "float32"), 0, tensor([2], "int64", 9000000, 9000001)], {}, {"decode_1": 1}),
    Case("gather", [tensor([8, 64], "float32"), 1, tensor([8, 1], "int64", 0, 63)], {}, {"decode_8": 1}),
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """The table of a sweep over the cases above."""
    folder = tmp_path_factory.mktemp("sweep")
    CaseFile({"model": "of the test"}, CASES).write(folder / "cases.json")
    command = [sys.executable, "-m", "sglang_fl", "aten-sweep", f"--shapes={folder / 'cases.json'}", f"--out={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "excluded.txt").exists()
    return Table.read(folder / "sweep.csv")


def of(table: Table, operator: str) -> Result:
    """The only result of an operator."""
    (result,) = (result for result in table.results if result.operator == operator)
    return result


@pytest.mark.parametrize("operator", ["cumsum", "embedding", "add_.Tensor", "gather"])
def test_numbers_are_measured_inside_a_graph(table: Table, operator: str) -> None:
    """Given a call that works, when swept, then it has an error, times in a graph and times on the host."""
    result = of(table, operator)
    assert not result.failure, result.failure
    assert result.how == "graph"
    assert 0 <= result.gems_error <= result.allowed_error
    assert min(result.torch_us, result.gems_us, result.torch_host_us, result.gems_host_us, result.ratio) > 0


def test_a_call_that_ends_the_device_costs_itself_only(table: Table) -> None:
    """Given an index out of range, when swept, then its case has a reason and the case after it has numbers."""
    assert of(table, "index_select").failure
    assert not of(table, "gather").failure


def test_the_table_says_what_it_was_measured_on(table: Table) -> None:
    """Given a sweep, then FlagGems' version and the card are in the table."""
    assert table.origin["card"] == torch.cuda.get_device_name()
    assert table.origin["flag_gems"]


_VALUES = """
import ctypes, json, sys
import torch
from sglang_fl.aten.layer import switch_on
from sglang_fl.config import load_settings
device = int(sys.argv[1])
torch.cuda.set_device(device)
torch.manual_seed(7)
# Sums of ones are exact in any order.
x = torch.ones(8, 4096, device="cuda")
weight = torch.randn(1000, 896, device="cuda", dtype=torch.bfloat16)
index = torch.randint(0, 1000, (32,), device="cuda")
def calls(): return torch.cumsum(x, -1), torch.nn.functional.embedding(index, weight)
own = calls()
outcome = switch_on(load_settings())
replaced = calls()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = calls()
graph.replay()
torch.cuda.synchronize()
equal = [torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(own, replaced, captured)]
def has_context(place):
    # The driver's answer for a primary context, without making one.
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(place, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)
contexts = [place for place in range(torch.cuda.device_count()) if has_context(place)]
print(json.dumps({"on": outcome.is_on, "reason": outcome.reason, "equal": equal, "contexts": contexts}))
"""


def test_replaced_operators_give_the_same_values_also_in_a_graph_and_are_recorded(tmp_path: Path) -> None:
    """Given two operators on the last GPU, when replaced, then values are equal, and the record names both."""

    device = torch.cuda.device_count() - 1
    path = tmp_path / "gems_aten.txt"
    variables = {
        "SGLANG_FL_FLAGOS_WHITELIST": "cumsum,embedding",
        "SGLANG_FLAGGEMS_RECORD": "1",
        "SGLANG_FLAGGEMS_LOG_PATH": str(path),
    }
    command = [sys.executable, "-c", _VALUES, str(device)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=os.environ | variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["on"], found["reason"]
    assert found["equal"] == [True, True]
    assert found["contexts"] == [device], "a context on another GPU"
    names = [line.split()[1].rpartition(".")[0] for line in path.read_text().splitlines()]
    assert {"flag_gems.ops.cumsum", "flag_gems.ops.embedding"} <= set(names)
    assert len(names) == len(set(names))


_PLANNED = """
import json
import torch
from sglang_fl.aten import layer, planned
from sglang_fl.aten.gems import load
from sglang_fl.aten.sweep.cases import read_cases
from sglang_fl.aten.sweep.forms import NOT_SLOWER, form_of_text
from sglang_fl.aten.sweep.inputs import Call
from sglang_fl.aten.sweep.results import Table
from sglang_fl.cli.aten_sweep import HOST_SHAPES, PROBES, SHAPES
from sglang_fl.config import load_settings
torch.cuda.set_device(0)
device = torch.device("cuda", 0)
settings = load_settings({}, "cuda")
table = Table.read(layer.stored_table(settings))
gems, forms = load(), table.forms()
names = settings.aten.verified
wrong, untaken, count = [], [], 0
def form(tensor):
    # The stride of a dimension of one element says nothing.
    return tensor.dtype, tensor.shape, [step for step, size in zip(tensor.stride(), tensor.shape) if size > 1]
with torch.inference_mode():
    # A call that is in several files is made once.
    cases = {case.key: case for file in (SHAPES, HOST_SHAPES, PROBES) for case in read_cases(file).cases}
    known = {entry.key for entry in gems.entries if entry.name in names}
    calls = [Call(case, device) for case in cases.values() if case.operator in known and '"cpu"' not in case.key]
    own = [call.run() for call in calls]
    # Whatever is not slower, outside of graphs as well: that is the launches' hardest test.
    replacement = planned.Replacement(
        layer._CountingLibrary, gems, names, forms, known, NOT_SLOWER, exact_only=False, keeps_plans=True
    )
    def check(operators, run):
        global count
        by_name = {operator.operator: operator for operator in operators}
        for call, right in zip(calls, own):
            operator, text = by_name.get(call.case.operator), call.case.describe()
            before = operator.taken() if operator else 0
            results = run(call)
            if operator is not None and forms.take(form_of_text(text)):
                count += 1
                if operator.taken() == before:
                    untaken.append(text)
            for result in results:
                for one, other in zip(right, result, strict=True):
                    close = torch.allclose(one.double(), other.double(), rtol=2e-2, atol=1e-4, equal_nan=True)
                    alike = form(one) == form(other)
                    if not (alike and close):
                        wrong.append(text)
    def captured(call):
        call.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call.run()
        graph.replay()
        torch.cuda.synchronize()
        return [result]
    check(replacement.eager, lambda call: [*(call.run() for _ in range(4)), *captured(call)])
    with replacement.capturing():
        check(replacement.in_graphs, captured)
    replacement.take_back()
print(json.dumps({"wrong": sorted(set(wrong)), "untaken": sorted(set(untaken)), "calls": count}))
"""


def test_measured_calls_go_to_kept_launches_and_stay_right(tmp_path: Path) -> None:
    """Given every recorded call of the verified operators, when made again and again, eagerly and in a graph, then the
    measured ones go to FlagGems by launches that are kept, and values, shapes and strides are PyTorch's."""
    command = [sys.executable, "-c", _PLANNED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["wrong"]
    # Of one tensor FlagGems makes a copy by PyTorch's own operator.
    assert found["untaken"] == ["cat([int64 4096])"], done.stderr
    assert found["calls"] > 80


_ALIASES = """
import json
import torch
from sglang_fl.aten import layer
from sglang_fl.config import load_settings
torch.cuda.set_device(0)
outcome = layer.switch_on(load_settings({}, "cuda"))
assert outcome.is_on, outcome
right = []
with torch.inference_mode():
    for round in range(6):
        base = torch.arange(64, device="cuda", dtype=torch.int64)
        x, y = base[:32], torch.full((32,), 7, device="cuda", dtype=torch.int64)
        # The same tensor twice, views of one memory, other memory: one key, other addresses.
        same, views, apart = torch.add(base, base), torch.add(x, base[32:]), torch.add(x, y)
        right += [torch.equal(same, torch.arange(64, device="cuda") * 2)]
        right += [torch.equal(views, torch.arange(0, 32, device="cuda") * 2 + 32)]
        right += [torch.equal(apart, torch.arange(0, 32, device="cuda") + 7)]
        x.add_(1)
        right += [x[0].item() == 1 and base[31].item() == 32 and base[32].item() == 32]
        total = torch.ones(32, device="cuda", dtype=torch.int32)
        total += 1
        right += [total.sum().item() == 64]
        # Another stream than the one on which the launches were noted.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            counted = torch.cumsum(torch.ones(8, device="cuda", dtype=torch.int32), 0)
        torch.cuda.current_stream().wait_stream(side)
        right += [counted.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]]
        right += [torch.cumsum(torch.ones(0, device="cuda", dtype=torch.int32), 0).numel() == 0]
print(json.dumps(right))
"""


def test_kept_launches_follow_the_tensors_of_each_call(tmp_path: Path) -> None:
    """Given calls of one form with the same, overlapping and other memory, on two streams, when made six times each,
    then each is right: what was noted holds no address of the call that it was noted on."""
    done = subprocess.run(
        [sys.executable, "-c", _ALIASES], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    right = json.loads(done.stdout.splitlines()[-1])
    assert all(right), right
