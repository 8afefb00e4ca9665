"""Every operator and implementation on a GPU: values, layouts, what stays unchanged, graphs, the second device.

Needs torch, triton and what is to be tested: flag_gems, sgl_kernel; neither SGLang nor this project's native part.
What is not installed fails: nothing is left out in silence. A table of what ran is printed at the end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from sglang_fl.dispatch.backends.flaggems.flaggems import FlagGemsBackend
from sglang_fl.dispatch.types import NotSupportedError, OpImpl
from sglang_fl.testing.operator_cases import MAX_POSITION, Call, Case, case_34, cases, cos_sin_cache
from sglang_fl.testing.operator_checks import problems
from sglang_fl.testing.operator_formulas import FORMULAS, NATIVE_ROUNDINGS
from sglang_fl.testing.operator_sizes import LARGE, Large
from tests.gpu.operator_implementations import implementations, must_refuse, refused_by_rule, roundings

pytestmark = pytest.mark.gpu

IMPLEMENTATIONS = list(implementations())
ran: Counter[tuple[str, str, str]] = Counter()
REPLAYS = 3


def of_impl(impl: OpImpl) -> str:
    """The test's name."""
    return f"{impl.op_name}-{impl.impl_id}"


each_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS, ids=of_impl)


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Print which implementation ran how many cases."""
    yield
    capture = sys.__stdout__
    if capture is not None:
        for (op_name, impl_id, what), count in sorted(ran.items()):
            capture.write(f"\n{op_name:20} {impl_id:14} {count:4} {what}")
        capture.write("\n")


@each_implementation
def test_it_is_available(impl: OpImpl) -> None:
    """Given a GPU with everything installed, when an implementation is asked, then it is available."""
    assert impl.availability().available, impl.availability().reason


def _unchanged(call: Call, before: list[torch.Tensor]) -> bool:
    tensors = [tensor for _, tensor, _ in call.tensors()]
    return all(torch.equal(a, b) or a.isnan().any() for a, b in zip(tensors, before, strict=True))


def _refuses(impl: OpImpl, case: Case, device: str) -> bool:
    call = case.build(torch.device(device))
    if refused_by_rule(impl, call):
        return True
    before = [tensor.clone() for _, tensor, _ in call.tensors()]
    try:
        impl.fn(call.obj, *call.args, **call.kwargs)
    except NotSupportedError:
        assert _unchanged(call, before), f"{case}: refused after it had written to an input"
        return True
    return False


def _check(impl: OpImpl, given: Iterator[Case] | tuple[Case, ...], device: str, what: str) -> None:
    found: list[str] = []
    for case in given:
        if must_refuse(impl, case):
            assert _refuses(impl, case, device), f"{case}: {impl.impl_id} must refuse it"
            ran[impl.op_name, impl.impl_id, "refused"] += 1
            continue
        assert not refused_by_rule(impl, case.build(torch.device(device))), f"{case}: refused by a rule"
        found += problems(case, impl.fn, device, roundings(impl))
        ran[impl.op_name, impl.impl_id, what] += 1
    assert not found, f"{len(found)} problems:\n" + "\n".join(found[:20])


@each_implementation
def test_values(impl: OpImpl) -> None:
    """Given the cases of an operator, when an implementation runs, then results and inputs are as the contract says."""
    _check(impl, cases(impl.op_name), "cuda", "cases right")


def _large(op_name: str) -> Iterator[Case]:
    for tokens, dtype in product((1, 4096), (torch.bfloat16, torch.float32)):
        yield Case(op_name, "a model's size", dtype, tokens, partial(LARGE[op_name], Large(tokens, dtype)))


@pytest.mark.parametrize("impl", [impl for impl in IMPLEMENTATIONS if impl.op_name in LARGE], ids=of_impl)
def test_values_of_a_models_size(impl: OpImpl) -> None:
    """Given 1 and 4096 tokens of a model's shapes, when an implementation runs, then the results are right."""
    _check(impl, _large(impl.op_name), "cuda", "large right")


@pytest.mark.parametrize("impl", [impl for impl in IMPLEMENTATIONS if impl.op_name == "rotary_embedding"], ids=of_impl)
def test_neighbouring_pairs_by_the_numbers_from_the_field(impl: OpImpl) -> None:
    """Given x = 1..8 and angles .1 .2 .3 .4, when neighbours are rotated, then the numbers of case 34 come out."""
    call, right = case_34(torch.device("cuda"))
    query, key = impl.fn(call.obj, *call.args, **call.kwargs)
    assert torch.allclose(query.cpu(), right, atol=6e-4, rtol=0)
    assert torch.equal(query, key)


# What is new at each replay: positions in args. Integers are positions in the rotary cache.
NEW_DATA = {
    "silu_and_mul": (0,),
    "gelu_and_mul": (0,),
    "rms_norm": (0, 1),
    "gemma_rms_norm": (0, 1),
    "rotary_embedding": (0, 1, 4),
    "mrotary_embedding": (0, 1, 2),
    "topk": (0,),
    "fused_moe": (0,),
}


def _refill(op_name: str, call: Call, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for position in NEW_DATA[op_name]:
        if position >= len(call.args):
            continue
        tensor = call.args[position]
        if not tensor.is_floating_point():
            new = torch.randint(MAX_POSITION, tensor.shape, generator=generator)
        elif op_name == "topk":
            new = torch.rand(tensor.shape, generator=generator).argsort(-1) / 16
        else:
            new = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(new)


def _expected(impl: OpImpl, call: Call) -> list[tuple[torch.Tensor, torch.Tensor]]:
    obj = SimpleNamespace(**{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in vars(call.obj).items()})
    args = [value.cpu() if isinstance(value, torch.Tensor) else value for value in call.args]
    kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in call.kwargs.items()}
    allowed = roundings(impl)
    allowed = NATIVE_ROUNDINGS[impl.op_name] if allowed is None else allowed
    return [(one.value, one.bound) for one in FORMULAS[impl.op_name](obj, *args, roundings=allowed, **kwargs)]


# What of a case's label counts as another way through an implementation; for the other operators all of it.
FORM: dict[str, Callable[[str], str]] = {
    "silu_and_mul": lambda label: "",
    "gelu_and_mul": lambda label: label.rpartition(", ")[2],
    "rms_norm": lambda label: "residual" if "residual" in label else "",
    "gemma_rms_norm": lambda label: "residual" if "residual" in label else "",
    "rotary_embedding": lambda label: ", ".join(label.split(", ")[:2]),
    "topk": lambda label: re.sub(r", [0-9]+ experts.*", "", label),
}


def _graph_cases(impl: OpImpl) -> list[Case]:
    """For each form of the operator, the first case that has tokens and that the implementation does."""
    wanted = torch.float32 if (impl.impl_id, impl.op_name) == ("vendor.nvidia", "rotary_embedding") else torch.bfloat16
    form = FORM.get(impl.op_name, str)
    first: dict[str, Case] = {}
    for case in cases(impl.op_name):
        fits = case.tokens == 7 and case.dtype is wanted and case.label != "float32 weight"
        if fits and not must_refuse(impl, case):
            first.setdefault(form(case.label), case)
    return list(first.values())


@each_implementation
def test_a_graph_replays_right_on_new_data(impl: OpImpl) -> None:
    """Given each form of a call, captured, when refilled and replayed three times, then each result is right."""
    for case in _graph_cases(impl):
        _check_replays(impl, case)


def _check_replays(impl: OpImpl, case: Case) -> None:
    for _ in range(2):
        warm = case.build(torch.device("cuda"))
        impl.fn(warm.obj, *warm.args, **warm.kwargs)
    torch.cuda.synchronize()
    call = case.build(torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = impl.fn(call.obj, *call.args, **call.kwargs)
    results = results if isinstance(results, tuple) else (results,)
    for seed in range(REPLAYS):
        _refill(impl.op_name, call, seed)
        expected = _expected(impl, call)
        graph.replay()
        got = [result.cpu().double() for result in results]
        if impl.op_name == "topk":
            order = results[1].cpu().long().argsort(-1)
            got = [tensor.gather(-1, order) for tensor in got]
        for result, (value, bound) in zip(got, expected, strict=True):
            wrong = ~((result - value).abs() <= bound)
            assert not wrong.any(), f"{case}, replay {seed + 1}: {int(wrong.sum())} of {wrong.numel()} are wrong"
        ran[impl.op_name, impl.impl_id, "replays right"] += 1


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
def test_rotating_in_place_gives_the_bits_of_out_of_place(head_size: int, interleaved: bool) -> None:
    """Given unaligned heads, when flagos rotates in place 20 times, then no warp has read another's result.

    In place, a program reads what it also writes; a view that begins at an odd element makes every load a narrow one.
    """
    rotate = FlagGemsBackend().rotary_embedding
    generator = torch.Generator("cuda").manual_seed(3)
    cache = cos_sin_cache(head_size, torch.float32, torch.device("cuda"))
    cos, sin = cache.chunk(2, -1)
    obj = SimpleNamespace(cos_sin_cache=cache)
    for _ in range(20):
        memory = torch.randn(2048 * 10 * head_size + 1, generator=generator, device="cuda").bfloat16()
        joined = memory[1:].view(2048, 10, head_size)
        query, key = joined[:, :8], joined[:, 8:]
        positions = torch.randint(MAX_POSITION, (2048,), generator=generator, device="cuda")
        right = rotate(obj, query, key, cos, sin, positions, interleaved, False)
        rotate(obj, query, key, cos, sin, positions, interleaved, True)
        assert torch.equal(query, right[0])
        assert torch.equal(key, right[1])


_PROBE_ON_THE_SECOND = """
import torch
torch.cuda.set_device(1)
from tests.gpu.operator_implementations import implementations
for impl in implementations():
    assert impl.availability().available, (impl.impl_id, impl.op_name, impl.availability().reason)
assert not torch._C._cuda_hasPrimaryContext(0), "probing made a context on device 0"
from sglang_fl.testing.operator_cases import cases
from sglang_fl.testing.operator_checks import problems
from tests.gpu.operator_implementations import must_refuse, roundings
count = 0
for impl in implementations():
    for case in cases(impl.op_name):
        if case.tokens == 7 and not must_refuse(impl, case):
            found = problems(case, impl.fn, "cuda:1", roundings(impl))
            assert not found, found
            count += 1
assert not torch._C._cuda_hasPrimaryContext(0), "a kernel made a context on device 0"
print(count, "cases right on cuda:1")
"""


def test_the_second_device_alone_is_used() -> None:
    """Given two GPUs and the second as the current one, when all is probed and run, then the first has no context."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU more: the current device must not be the first")
    done = subprocess.run(
        [sys.executable, "-c", _PROBE_ON_THE_SECOND],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stdout.write(done.stdout)
