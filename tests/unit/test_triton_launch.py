"""Launches without Triton's Python against ordinary ones: Triton compiles for sm_90, and a stand-in is the driver.

No kernel runs here: what would reach the C launcher is noted. That it then runs, the tests marked gpu show.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from sglang_fl import triton_launch
from sglang_fl.dispatch.backends.flaggems import choices, triton_kernels
from sglang_fl.dispatch.backends.flaggems.flaggems import FlagGemsBackend
from sglang_fl.dispatch.backends.flaggems.impl import activation, normalization, rotary, shapes
from sglang_fl.testing.operator_cases import cos_sin_cache
from sglang_fl.triton_launch import bind, specialisation

STREAMS = {0: 700, 1: 701}


@triton.jit(do_not_specialize=["count"])
def copied_rows(x_ptr, out_ptr, stride, count, factor, width: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, width)
    inside = column < count
    tl.store(out_ptr + row * width + column, tl.load(x_ptr + row * stride + column, inside) * factor, inside)


@dataclass
class NotingDriver:
    """What Triton 3.6 asks of a driver; notes each call of the launcher, and calls the hooks as the real one does."""

    device: int = 0
    launched: list[tuple[Any, ...]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": 232_448}
        )

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self.loaded.append(name)
        return "module", f"{name} of device {device}: {hash(binary)}", 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def run(x: int, y: int, z: int, stream: int, function: str, packed: Any, about: Any, *rest: Any) -> None:
            enter, leave, *arguments = rest
            if enter is not None:
                enter(about)
            addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
            self.launched.append((x, y, z, stream, function, packed, self.device, *addresses))
            if leave is not None:
                leave(about)

        return run

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAMS[device]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


KERNELS = (copied_rows, triton_kernels.gated_kernel, triton_kernels.rms_norm_kernel, triton_kernels.rotary_kernel)


def _forget() -> None:
    for kernel in KERNELS:
        kernel.device_caches.clear()
    for module in (activation, normalization, rotary):
        module._launches.clear()
    shapes.launches_dependently.cache_clear()
    triton_launch._say_once.cache_clear()


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotingDriver]:
    """The driver's stand-in in the place of the machine's, with two devices of compute capability 9.0."""
    noting = NotingDriver()

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, noting.device = noting.device, index
        yield
        noting.device = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: noting.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", STREAMS.__getitem__, raising=False)
    _forget()
    monkeypatch.setattr(driver, "_active", noting)
    yield noting
    _forget()


def _tensors(offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(64)[offset:], torch.zeros(64)


def _bound(arguments: tuple[Any, ...]) -> triton_launch.Launch:
    return bind(copied_rows, arguments, {"width": 16}, {"num_warps": 2}, 0)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("stride", [1, 3, 16, 2**31 + 16, 2**31 + 1])
def test_it_launches_what_the_ordinary_way_launches(noting: NotingDriver, stride: int, offset: int) -> None:
    """Given arguments of each class, when launched both ways, then the launcher gets the same."""
    x, out = _tensors(offset)
    arguments = (x, out, stride, 5, 0.5)
    copied_rows[(7, 2)](*arguments, width=16, num_warps=2)

    launch = _bound(arguments)
    launch(7, 2, *arguments)

    ordinary, bound = noting.launched
    assert bound == ordinary
    assert bound[:4] == (7, 2, 1, STREAMS[0])


def test_integers_of_one_class_and_only_those_share_a_compiled_kernel(noting: NotingDriver) -> None:
    """Given integers at the borders of Triton's classes, then equal classes and equal kernels are the same thing."""
    integers = (0, 1, 2, 15, 16, 17, 32, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**33)
    x, out = _tensors()
    for stride in integers:
        copied_rows[(1,)](x, out, stride, 5, 0.5, width=16)

    kernels = [launched[4] for launched in noting.launched]
    cached = list(copied_rows.device_caches[0][0])
    assert len(cached) == len({specialisation(stride) for stride in integers})
    for one, kernel in zip(integers, kernels, strict=True):
        for other, its_kernel in zip(integers, kernels, strict=True):
            if specialisation(one) == specialisation(other):
                assert kernel == its_kernel, (one, other)


def test_profilers_hooks_are_called_and_else_nothing_is(noting: NotingDriver) -> None:
    """Given a bound launch, when hooks are added later, then they get its name, and none once they are removed."""
    seen: list[tuple[str, Any]] = []

    def enter(about: Any) -> None:
        seen.append(("enter", about.get()["name"]))

    def leave(about: Any) -> None:
        seen.append(("leave", about.get()["stream"]))

    arguments = (*_tensors(), 16, 5, 0.5)
    launch = _bound(arguments)
    launch(1, 1, *arguments)
    assert seen == []
    knobs.runtime.launch_enter_hook.add(enter)
    knobs.runtime.launch_exit_hook.add(leave)
    try:
        launch(1, 1, *arguments)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
        knobs.runtime.launch_exit_hook.remove(leave)
    launch(1, 1, *arguments)

    assert seen == [("enter", "copied_rows"), ("leave", STREAMS[0])]
    assert len(set(noting.launched)) == 1


def test_it_launches_on_its_own_device_whichever_is_current(noting: NotingDriver) -> None:
    """Given a launch for device 1, when device 0 is current, then it is on 1's stream, and 0 is current again."""
    arguments = (*_tensors(), 16, 5, 0.5)
    launch = bind(copied_rows, arguments, {"width": 16}, {}, 1)

    launch(1, 1, *arguments)

    assert noting.launched[-1][3] == STREAMS[1]
    assert "of device 1" in noting.launched[-1][4]
    assert noting.launched[-1][6] == 1
    assert noting.device == 0


def test_another_triton_is_launched_in_the_ordinary_way_and_said_once(
    noting: NotingDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Given a Triton whose launcher nobody read, when bound twice, then launches are ordinary, with one warning."""
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    ordinary: list[tuple[Any, ...]] = []

    class Kernel(SimpleNamespace):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **named: ordinary.append((grid, arguments, named))

    kernel = Kernel(arg_names=copied_rows.arg_names, __name__="copied_rows")
    arguments = (*_tensors(), 16, 5, 0.5)
    with caplog.at_level(logging.WARNING, "sglang_fl.triton_launch"):
        for _ in range(2):
            bind(kernel, arguments, {"width": 16}, {"num_warps": 2}, 0)(3, 2, *arguments)

    assert ordinary == [((3, 2), arguments, {"width": 16, "num_warps": 2})] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "[sglang_fl] Triton kernels are launched in the ordinary way, at more host time a call: "
        "Triton 3.7.0 is installed, and launches without its Python were written for 3.6.x"
    ]
    assert noting.loaded == []


def test_hooks_of_a_kernel_before_its_run_are_kept(noting: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a kernel with a hook that runs before each launch, when it is launched, then the hook runs."""
    seen: list[int] = []
    monkeypatch.setattr(copied_rows, "pre_run_hooks", [lambda *arguments, **named: seen.append(arguments[2])])
    arguments = (*_tensors(), 16, 5, 0.5)

    launch = _bound(arguments)
    launch(1, 1, *arguments)

    assert seen == [16]
    assert len(noting.launched) == 1


def test_constants_must_be_last_and_complete() -> None:
    """Given an argument too few, when bound, then the error names the parameters."""
    with pytest.raises(ValueError, match=r"copied_rows.*4 arguments and then width; constants must be the last"):
        bind(copied_rows, (*_tensors(), 16, 5), {"width": 16}, {}, 0)


class OnDevice(torch.Tensor):
    """A tensor of the CPU that says it is on device 0."""

    def get_device(self) -> int:
        """0."""
        return 0


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, said to be on device 0."""
    return tensor.as_subclass(OnDevice)


BACKEND = FlagGemsBackend()
Operator = Callable[[], Any]


def _rows(tokens: int, width: int, stride: int = 0, offset: int = 0) -> torch.Tensor:
    stride = stride or width
    memory = torch.zeros(tokens * stride + offset + width, dtype=torch.bfloat16)
    return on_device(memory.as_strided((tokens, width), (stride, 1), offset))


def _silu(tokens: int, width: int, stride: int = 0, offset: int = 0) -> Operator:
    x = _rows(tokens, 2 * width, stride, offset)
    return lambda: BACKEND.silu_and_mul(None, x)


def _rms_norm(tokens: int, width: int, stride: int = 0, offset: int = 0) -> Operator:
    layer = SimpleNamespace(weight=torch.ones(width, dtype=torch.bfloat16), variance_epsilon=1e-6)
    x = _rows(tokens, width, stride, offset)
    return lambda: BACKEND.rms_norm(layer, x)


def _add_rms_norm(tokens: int, width: int, stride: int = 0, offset: int = 0) -> Operator:
    layer = SimpleNamespace(weight=torch.ones(width, dtype=torch.bfloat16), variance_epsilon=1e-6)
    x, residual = _rows(tokens, width, 0, offset), _rows(tokens, width, 0, 2 * offset)
    return lambda: BACKEND.gemma_rms_norm(layer, x, residual)


def _rotary(tokens: int, width: int, stride: int = 0, offset: int = 0) -> Operator:
    cos, sin = cos_sin_cache(64, torch.float32, torch.device("cpu")).chunk(2, -1)
    heads = _rows(tokens, 10 * 64, max(stride, 640), offset).unflatten(1, (10, 64))
    positions = torch.zeros(2 * tokens, dtype=torch.int64)[:: 2 if offset else 1][:tokens]
    return lambda: BACKEND.rotary_embedding(None, heads[:, :8], heads[:, 8:], cos, sin, positions)


FORMS: dict[str, tuple[Callable[..., Operator], int]] = {
    "silu_and_mul": (_silu, 896),
    "rms_norm": (_rms_norm, 896),
    "gemma_rms_norm with residual": (_add_rms_norm, 896),
    "rotary_embedding": (_rotary, 896),
}
each_form = pytest.mark.parametrize("name", FORMS)


def _launched(noting: NotingDriver, call: Operator) -> tuple[Any, ...]:
    noting.launched.clear()
    call()
    (launched,) = noting.launched
    # The result's memory is a new one each time; what else of the arguments differs would be seen.
    return launched


@each_form
def test_alternating_layouts_get_the_kernels_that_the_ordinary_way_gives_them(noting: NotingDriver, name: str) -> None:
    """Given calls whose strides, alignment and sizes alternate, when launched by what is kept, then each is right."""
    make, width = FORMS[name]
    layouts = [
        (tokens, width, stride, offset)
        for tokens in (1, 4096)
        for stride, offset in ((0, 0), (2 * width + 16, 0), (2 * width + 3, 0), (0, 1), (2 * width + 16, 8))
    ]
    calls = [make(*layout) for layout in layouts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch, "TRITON_VERSIONS", ("0.",))
        ordinary = [_launched(noting, call)[:7] for call in calls]
    for module in (activation, normalization, rotary):
        module._launches.clear()

    for _ in range(2):
        kept = [_launched(noting, call)[:7] for call in calls]
        assert kept == ordinary
    assert len(OrderedDict.fromkeys(launched[4] for launched in kept)) > 1


@each_form
def test_one_call_compiles_what_any_number_of_tokens_needs(noting: NotingDriver, name: str) -> None:
    """Given a call of one token, when others follow with more, then nothing is compiled or loaded any more."""
    make, width = FORMS[name]
    make(1, width)()
    loaded = list(noting.loaded)

    for tokens in (2, 7, 64, 512, 4096, 20_000):
        make(tokens, width)()

    assert noting.loaded == loaded
    assert len(noting.launched) == 7


@each_form
@pytest.mark.parametrize("width", [896, 5120])
def test_aligned_memory_is_read_and_written_in_vectors(noting: NotingDriver, name: str, width: int) -> None:
    """Given a model's sizes, when compiled for sm_90, then a thread reads and writes several elements of a row at once.

    Beside rows, a program of the rotary embedding reads a position, and a number of each table a thread.
    """
    make, _ = FORMS[name]
    make(1, width)()

    compiled = [made for kernel in KERNELS[1:] for made in kernel.device_caches[0][0].values()]
    assert compiled
    for made in compiled:
        accesses = [line for line in made.asm["ptx"].splitlines() if "ld.global" in line or "st.global" in line]
        single = [line for line in accesses if ".v2." not in line and ".v4." not in line]
        assert len(single) <= (3 if "rotary" in name else 0), single
        assert len(accesses) > len(single)
        assert not any(".b16" in line for line in accesses)


@pytest.mark.parametrize("table", [choices.GATED, choices.RMS_NORM, choices.ADD_RMS_NORM, choices.ROTARY])
@pytest.mark.parametrize("width", [1, 128, 896, 5120, 13_824, normalization.LARGEST_ROW])
def test_every_size_has_a_choice_that_can_be_launched(table: tuple[Any, ...], width: int) -> None:
    """Given a table, then limits are powers of two, and each number of tokens has a row whose threads have work."""
    assert all(row.below_tokens & (row.below_tokens - 1) == 0 for row in table)
    by_bits = choices.by_bits(table, width, lambda row: row)
    assert len(by_bits) == choices.LARGEST_BITS + 1
    for bits in range(1, choices.LARGEST_BITS + 1):
        row = by_bits[bits]
        assert 2**bits <= row.below_tokens
        if isinstance(row, choices.Norm):
            block = shapes.next_power_of_two(width)
            warps = row.warps(block)
            assert warps == 1 or 32 * warps <= block * row.rows
