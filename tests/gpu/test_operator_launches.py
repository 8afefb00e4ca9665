"""How the flagos operators' kernels are launched on a GPU: layouts in turn, streams, devices, and dependent launches.

Needs torch, triton and flag_gems; neither SGLang nor this project's native part. Results are held against the same
call on a copy that is laid out plainly: the mathematics is tested in test_operators.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from sglang_fl.dispatch.backends.flaggems.flaggems import FlagGemsBackend
from sglang_fl.testing.operator_cases import MAX_POSITION, cos_sin_cache

pytestmark = pytest.mark.gpu

WIDTH, HEADS, KEY_HEADS, HEAD_SIZE = 896, 14, 2, 64
BACKEND = FlagGemsBackend()
Results = tuple[torch.Tensor, ...]


@cache
def _layer(width: int, device: torch.device) -> SimpleNamespace:
    weight = torch.linspace(-1, 1, width).bfloat16().to(device)
    return SimpleNamespace(weight=weight, variance_epsilon=1e-6)


def _silu(x: torch.Tensor) -> Results:
    return (BACKEND.silu_and_mul(None, x),)


def _rms_norm(x: torch.Tensor) -> Results:
    result = BACKEND.rms_norm(_layer(x.shape[1], x.device), x)
    assert isinstance(result, torch.Tensor)
    return (result,)


def _add_rms_norm(x: torch.Tensor) -> Results:
    # Both are handed over; x stays for the comparison.
    return tuple(BACKEND.rms_norm(_layer(x.shape[1], x.device), x.clone(), x.flip(1)))


def _rotary(x: torch.Tensor) -> Results:
    # As wide as the rest of the cases: 14 heads of 64, of which two are the keys.
    heads = x.unflatten(1, (HEADS, HEAD_SIZE))
    cos, sin = cos_sin_cache(HEAD_SIZE, torch.float32, x.device).chunk(2, -1)
    positions = torch.arange(x.shape[0], device=x.device) * 7 % MAX_POSITION
    query, key = heads[:, :-KEY_HEADS], heads[:, -KEY_HEADS:]
    return BACKEND.rotary_embedding(None, query, key, cos, sin, positions, False, False)


OPERATORS: dict[str, Callable[[torch.Tensor], Results]] = {
    "silu_and_mul": _silu,
    "rms_norm": _rms_norm,
    "rms_norm with residual": _add_rms_norm,
    "rotary_embedding": _rotary,
}
each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)

# Distance between rows beyond their width, and elements before the first: aligned, rows at odd places, all at odd ones.
LAYOUTS = ((0, 0), (16, 0), (3, 0), (0, 1), (16, 8), (1, 3))


def _laid_out(values: torch.Tensor, gap: int, offset: int) -> torch.Tensor:
    tokens, width = values.shape
    memory = values.new_full((tokens * (width + gap) + offset + 16,), 7)
    return memory.as_strided((tokens, width), (width + gap, 1), offset).copy_(values)


def _values(tokens: int, device: str = "cuda", seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def _same(results: Results, expected: Results) -> bool:
    return all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def _close(results: Results, expected: Results) -> bool:
    # Another layout or number of tokens may sum a row in another order: half a step of bfloat16 more or less.
    pairs = zip(results, expected, strict=True)
    return all(torch.allclose(one, other, rtol=2**-7, atol=1e-6) for one, other in pairs)


@each_operator
def test_layouts_in_turn(operator: Callable[[torch.Tensor], Results]) -> None:
    """Given rows with gaps and at odd addresses, when they come in turn, twice, then none gets another's kernel."""
    for tokens in (1, 5, 300):
        values = _values(tokens)
        expected = operator(values)
        for gap, offset in (*LAYOUTS, *LAYOUTS[::-1]):
            assert _close(operator(_laid_out(values, gap, offset)), expected), (tokens, gap, offset)


@each_operator
def test_two_streams_in_turn(operator: Callable[[torch.Tensor], Results]) -> None:
    """Given inputs that are made late on their own streams, when each is used there, then each result is right."""
    values = [_values(4096, seed=seed) for seed in range(2)]
    expected = [operator(one) for one in values]
    streams = [torch.cuda.Stream() for _ in values]
    torch.cuda.synchronize()
    for _ in range(10):
        results = []
        for stream, one in zip(streams, values, strict=True):
            with torch.cuda.stream(stream):
                late = torch.zeros_like(one)
                torch.cuda._sleep(1_000_000)
                late.copy_(one)
                results.append(operator(late))
        torch.cuda.synchronize()
        assert all(_same(got, right) for got, right in zip(results, expected, strict=True))


@each_operator
def test_a_device_that_is_not_the_current_one(operator: Callable[[torch.Tensor], Results]) -> None:
    """Given two GPUs in turn while the first is current, when called, then each computes its own, and it stays so."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU more")
    expected = operator(_values(7))
    for _ in range(3):
        for device in ("cuda:0", "cuda:1"):
            results = operator(_values(7, device))
            assert all(result.device == torch.device(device) for result in results)
            assert _same(tuple(result.to("cuda:0") for result in results), expected)
            assert torch.cuda.current_device() == 0


def _chain(x: torch.Tensor, residual: torch.Tensor, between: Callable[[], object]) -> Results:
    layer = _layer(WIDTH, x.device)
    for _ in range(20):
        between()
        x, residual = BACKEND.rms_norm(layer, x, residual)
        between()
        wide = torch.cat((x, x.flip(1)), 1)
        between()
        x = BACKEND.silu_and_mul(None, wide)
        between()
        x = BACKEND.rms_norm(layer, x)
    return x, residual


@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_a_kernel_launched_while_the_one_before_runs_reads_what_that_one_wrote(tokens: int) -> None:
    """Given a chain of kernels that read each other's results in memory that is used again, captured and replayed.

    Then its results are those of the same chain with a wait for the device between any two.
    """
    values = _values(tokens), _values(tokens, seed=1)
    right = _chain(*(value.clone() for value in values), torch.cuda.synchronize)
    inputs = [value.clone() for value in values]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _chain(*(value.clone() for value in inputs), lambda: None)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert _same(results, right)
    assert _same(_chain(*(value.clone() for value in values), lambda: None), right)


def test_more_than_2_to_the_31_elements() -> None:
    """Given rows that reach beyond 2**31 elements, when each operator runs, then the last row is right."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    rows, width = 2**16 + 1, 2**15
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.linspace(-2, 2, width)
    last = x[-1:].clone()
    layer = _layer(width, x.device)
    silu, norm = BACKEND.silu_and_mul, BACKEND.rms_norm
    assert _close((silu(None, x)[-1:],), (silu(None, last),))
    assert _close((norm(layer, x)[-1:],), (norm(layer, last),))
    results = norm(layer, x, x.clone())
    assert _close(tuple(result[-1:] for result in results), tuple(norm(layer, last.clone(), last.clone())))
