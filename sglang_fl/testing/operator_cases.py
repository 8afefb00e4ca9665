"""Inputs on which every implementation of every operator is tested, the same numbers on every device.

``for case in cases("rms_norm"): assert not problems(case, implementation, device)``, with
:func:`sglang_fl.testing.operator_checks.problems`. Needs PyTorch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from sglang_fl.testing.operator_formulas import FORMULAS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOKENS = (0, 1, 7, 64)
HEAD_SIZES = (64, 80, 96, 128, 192, 256)
MAX_POSITION = 30_016
FAR_POSITION = 30_000
_EPSILON = 1e-6


class Layout(Enum):
    """How a tensor's first two dimensions lie in memory."""

    CONTIGUOUS = "contiguous"
    EVERY_SECOND_ROW = "every second row"
    TRANSPOSED = "transposed"
    SLICE = "slice of a wider tensor"


def laid_out(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A view with these values and that layout; what lies around it in memory is filled with 7."""
    if layout is Layout.CONTIGUOUS:
        return values.clone(memory_format=torch.contiguous_format)
    if layout is Layout.TRANSPOSED:
        return values.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    rows, columns, *rest = values.shape
    if layout is Layout.EVERY_SECOND_ROW:
        view = values.new_full((2 * rows, columns, *rest), 7)[::2]
    else:
        view = values.new_full((rows, columns + 6, *rest), 7)[:, 4 : columns + 4]
    return view.copy_(values)


@dataclass(frozen=True)
class Call:
    """What an implementation is called with.

    Attributes:
        obj: the layer's attributes.
        args: what follows obj.
        kwargs: by name.
        handed_over: positions in ``args`` of tensors that may be written.
        written: result and position in ``args`` that must be one memory.
    """

    obj: SimpleNamespace
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    handed_over: tuple[int, ...] = ()
    written: tuple[tuple[int, int], ...] = ()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor and whether it may be written, of everything that is a tensor; the layer's first."""
        named = [*vars(self.obj).items(), *self.kwargs.items()]
        yield from ((name, value, False) for name, value in named if isinstance(value, torch.Tensor))
        for position, value in enumerate(self.args):
            if isinstance(value, torch.Tensor):
                yield f"argument {position + 1}", value, position in self.handed_over


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        op_name: the operator.
        label: what is special about it.
        dtype: of the operator's main input.
        tokens: number of tokens.
        build: makes the call's tensors on a device, the same values every time and on every device.
    """

    op_name: str
    label: str
    dtype: torch.dtype
    tokens: int
    build: Callable[[torch.device], Call]

    def __str__(self) -> str:
        return f"{self.op_name} {str(self.dtype).removeprefix('torch.')} {self.tokens} tokens, {self.label}"


@dataclass(frozen=True)
class _Source:
    # Random numbers from the CPU, so that they are the same on every device.
    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers of that standard deviation."""
        values = torch.randn(*shape, generator=self.generator) * scale
        return values.to(device=self.device, dtype=dtype or self.dtype)

    def integers(self, *shape: int, below: int) -> torch.Tensor:
        """Integers from 0, int64."""
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def permutations(self, rows: int, length: int) -> torch.Tensor:
        """A permutation in each row, int64."""
        return torch.rand(rows, length, generator=self.generator).argsort(-1).to(self.device)


_Make = Callable[[_Source], Call]


def _case(op_name: str, label: str, dtype: torch.dtype, tokens: int, make: _Make) -> Case:
    def build(device: torch.device) -> Call:
        return make(_Source(torch.Generator().manual_seed(20), device, dtype))

    return Case(op_name, label, dtype, tokens, build)


def _activation_cases(op_name: str, obj: SimpleNamespace) -> Iterator[Case]:
    form = "".join(f", {value}" for value in vars(obj).values())
    for dtype, tokens, layout in product(DTYPES, TOKENS, Layout):

        def make(source: _Source, tokens: int = tokens, layout: Layout = layout) -> Call:
            return Call(obj, (laid_out(source.normal(tokens, 2 * 352, scale=2), layout),))

        yield _case(op_name, layout.value + form, dtype, tokens, make)
    yield _case(op_name, "three dimensions" + form, torch.float32, 6, lambda s: Call(obj, (s.normal(2, 3, 256),)))


def _norm_cases(op_name: str) -> Iterator[Case]:
    for dtype, tokens, layout, with_residual in product(DTYPES, TOKENS, Layout, (False, True)):

        def make(
            source: _Source, tokens: int = tokens, layout: Layout = layout, with_residual: bool = with_residual
        ) -> Call:
            obj = SimpleNamespace(weight=source.normal(320, scale=0.5), variance_epsilon=_EPSILON, hidden_size=320)
            x = laid_out(source.normal(tokens, 320), layout)
            if not with_residual:
                return Call(obj, (x,))
            return Call(obj, (x, laid_out(source.normal(tokens, 320), layout)), handed_over=(0, 1))

        label = layout.value + (", residual" if with_residual else "")
        yield _case(op_name, label, dtype, tokens, make)

    def mixed(source: _Source) -> Call:
        weight = source.normal(320, scale=0.5, dtype=torch.float32)
        return Call(
            SimpleNamespace(weight=weight, variance_epsilon=_EPSILON, hidden_size=320), (source.normal(7, 320),)
        )

    yield _case(op_name, "float32 weight", torch.bfloat16, 7, mixed)

    def heads(source: _Source) -> Call:
        obj = SimpleNamespace(weight=source.normal(128, scale=0.5), variance_epsilon=_EPSILON, hidden_size=128)
        return Call(obj, (source.normal(7, 3, 256)[..., :128],))

    for dtype in DTYPES:
        yield _case(op_name, "three dimensions", dtype, 7, heads)


@lru_cache(maxsize=64)
def cos_sin_cache(rotary_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[MAX_POSITION, rotary_dim], cos before sin, for base 10,000; shared, as no implementation may write it."""
    frequencies = 10_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.outer(torch.arange(MAX_POSITION, dtype=torch.float64), frequencies)
    return torch.cat((angles.cos(), angles.sin()), -1).to(device=device, dtype=dtype)


def _positions(source: _Source, *shape: int) -> torch.Tensor:
    positions = source.integers(*shape, below=MAX_POSITION)
    flat = positions.view(-1)
    flat[:1] = FAR_POSITION
    flat[1:2] = 0
    flat[-1:] = FAR_POSITION
    return positions


@dataclass(frozen=True)
class _Rotary:
    tokens: int = 7
    layout: Layout = Layout.CONTIGUOUS
    head_size: int = 64
    rotary_dim: int = 64
    interleaved: bool = False
    inplace: bool = True
    cache: torch.dtype = torch.float32
    index: torch.dtype = torch.int64

    def label(self) -> str:
        kind = "interleaved" if self.interleaved else "NeoX"
        where = "in place" if self.inplace else "out of place"
        of = f"{self.rotary_dim} of {self.head_size}"
        cache, index = (str(dtype).removeprefix("torch.") for dtype in (self.cache, self.index))
        return f"{kind}, {where}, {of}, {self.layout.value}, {cache} cache, {index} positions"

    def __call__(self, source: _Source) -> Call:
        cache = cos_sin_cache(self.rotary_dim, self.cache, source.device)
        obj = SimpleNamespace(
            cos_sin_cache=cache,
            head_size=self.head_size,
            rotary_dim=self.rotary_dim,
            is_neox_style=not self.interleaved,
            max_position_embeddings=MAX_POSITION,
        )
        query, key = (
            laid_out(source.normal(self.tokens, heads, self.head_size), self.layout)[..., : self.rotary_dim]
            for heads in (6, 2)
        )
        positions = _positions(source, self.tokens).to(self.index)
        return Call(
            obj,
            (query, key, *cache.chunk(2, -1), positions),
            {"rotary_interleaved": self.interleaved, "inplace": self.inplace},
            handed_over=(0, 1) if self.inplace else (),
            written=((0, 0), (1, 1)) if self.inplace else (),
        )


def _rotary_cases() -> Iterator[Case]:
    def case(dtype: torch.dtype, rotary: _Rotary) -> Case:
        return _case("rotary_embedding", rotary.label(), dtype, rotary.tokens, rotary)

    for dtype, tokens, layout, inplace in product(DTYPES, TOKENS, Layout, (True, False)):
        yield case(dtype, _Rotary(tokens, layout, inplace=inplace))
    for dtype, head_size, interleaved in product(DTYPES, HEAD_SIZES, (False, True)):
        yield case(dtype, _Rotary(head_size=head_size, rotary_dim=head_size, interleaved=interleaved))
        yield case(dtype, _Rotary(head_size=head_size, rotary_dim=head_size // 2, interleaved=interleaved))
    for dtype, interleaved, inplace in product(DTYPES, (False, True), (True, False)):
        yield case(dtype, _Rotary(interleaved=interleaved, inplace=inplace, cache=dtype, index=torch.int32))


def case_34(device: torch.device) -> tuple[Call, torch.Tensor]:
    """Case 34 from the field, by its numbers: neighbouring pairs of 1..8, angles .1 .2 .3 .4; to three decimals."""
    angles = torch.tensor([[0.1, 0.2, 0.3, 0.4]], device=device)
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    x = torch.arange(1.0, 9.0, device=device).view(1, 1, 8)
    obj = SimpleNamespace(cos_sin_cache=cache, head_size=8, rotary_dim=8, is_neox_style=False)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    right = torch.tensor([0.795, 2.09, 2.146, 4.516, 3.004, 7.21, 3.332, 10.094])
    call = Call(
        obj, (x, x.clone(), *cache.chunk(2, -1), position), {"rotary_interleaved": True, "inplace": True}, (0, 1)
    )
    return call, right.view(1, 1, 8)


def _glm_axis_map(section: list[int]) -> torch.Tensor:
    # As SGLang's MRotaryEmbedding makes it: round robin over the axes, passing over those that have all their pairs.
    left, axes = list(section), []
    for pair in range(sum(section)):
        axis = next(axis % 3 for axis in range(pair % 3, pair % 3 + 3) if left[axis % 3])
        left[axis] -= 1
        axes.append(axis)
    return torch.tensor(axes)


@dataclass(frozen=True)
class MultimodalForm:
    """How a family of models divides the pairs of a head: its section list and which interleaving."""

    family: str
    head_size: int
    rotary_dim: int
    section: tuple[int, ...]
    interleaved: bool = False
    glm: bool = False
    neox: bool = True


MULTIMODAL_FORMS = (
    MultimodalForm("Qwen2-VL", 128, 128, (16, 24, 24)),
    MultimodalForm("Qwen3-VL", 128, 128, (24, 20, 20), interleaved=True),
    MultimodalForm("Qwen3.5", 256, 64, (11, 11, 10), interleaved=True),
    MultimodalForm("GLM-4.1V", 128, 64, (8, 12, 12), neox=False),
    MultimodalForm("GLM-V interleaved", 128, 64, (8, 12, 12), interleaved=True, glm=True),
)


def _mrotary_cases() -> Iterator[Case]:
    grid = [(form, dtype, 7, Layout.CONTIGUOUS) for form, dtype in product(MULTIMODAL_FORMS, DTYPES)]
    grid += [(MULTIMODAL_FORMS[0], *rest) for rest in product(DTYPES, TOKENS, Layout)]
    for (form, dtype, tokens, layout), axes in product(dict.fromkeys(grid), (3, 1)):

        def make(
            source: _Source,
            form: MultimodalForm = form,
            tokens: int = tokens,
            layout: Layout = layout,
            axes: int = axes,
        ) -> Call:
            axis_map = _glm_axis_map(list(form.section)).to(source.device) if form.glm else None
            obj = SimpleNamespace(
                head_size=form.head_size,
                rotary_dim=form.rotary_dim,
                is_neox_style=form.neox,
                cos_sin_cache=cos_sin_cache(form.rotary_dim, torch.float32, source.device),
                mrope_section=list(form.section),
                mrope_interleaved=form.interleaved,
                mrope_interleaved_glm=form.glm,
                axis_map=axis_map,
            )
            positions = _positions(source, 3, tokens) if axes == 3 else _positions(source, tokens)
            query, key = (laid_out(source.normal(tokens, n * form.head_size), layout) for n in (4, 2))
            return Call(obj, (positions, query, key), handed_over=(1, 2))

        label = f"{form.family}, {layout.value}, {'positions of three axes' if axes == 3 else 'plain positions'}"
        yield _case("mrotary_embedding", label, dtype, tokens, make)


_TOPK_FORMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, weights as they are": {"renormalize": False},
    "sigmoid": {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
    "softmax and bias": {"bias": True},
    "sigmoid and bias": {"scoring_func": "sigmoid", "bias": True, "renormalize": False},
    "groups": {"num_expert_group": 4, "topk_group": 2},
    "groups, sigmoid and bias": {
        "scoring_func": "sigmoid",
        "bias": True,
        "num_expert_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
}


def _topk_cases() -> Iterator[Case]:
    grid = [
        (form, dtype, 7, Layout.CONTIGUOUS, e) for form in _TOPK_FORMS for dtype in DTYPES for e in (8, 60, 128, 256)
    ]
    grid += [(form, *rest, 128) for form in ("softmax", "groups") for rest in product(DTYPES, TOKENS, Layout)]
    for form, dtype, tokens, layout, experts in dict.fromkeys(grid):

        def make(
            source: _Source,
            form: str = form,
            tokens: int = tokens,
            layout: Layout = layout,
            experts: int = experts,
        ) -> Call:
            # Sixteenths: exact in every dtype, and all different, as among equal scores any choice is right.
            logits = ((source.permutations(tokens, experts) - experts // 2) / 16).to(source.dtype)
            options = dict(_TOPK_FORMS[form])
            if options.pop("bias", False):
                options["correction_bias"] = source.normal(experts, scale=0.1, dtype=torch.float32)
            return Call(SimpleNamespace(), (laid_out(logits, layout), 4 if experts == 8 else 8), options)

        yield _case("topk", f"{form}, {experts} experts, {layout.value}", dtype, tokens, make)


@dataclass(frozen=True)
class _Experts:
    name: str
    activation: str = "silu"
    weight_on_input: bool = False
    biases: bool = False
    scaling: float | None = None
    elsewhere: bool = False
    experts: int = 8
    top_k: int = 2
    tokens: int = 7
    layout: Layout = Layout.CONTIGUOUS
    index: torch.dtype = torch.int32

    def __call__(self, source: _Source) -> Call:
        hidden, inner = 64, 48
        w13 = source.normal(self.experts, 2 * inner, hidden, scale=hidden**-0.5)
        w2 = source.normal(self.experts, hidden, inner, scale=inner**-0.5)
        ids = source.permutations(self.tokens, self.experts)[:, : self.top_k].to(self.index).contiguous()
        weights = torch.rand(self.tokens, self.top_k, generator=source.generator).to(source.device) + 0.1
        if self.elsewhere:
            ids.view(-1)[::3] = -1
            weights.view(-1)[::3] = float("nan")  # the weight of an expert of another rank means nothing
        biases = {
            "w13_bias": source.normal(self.experts, 2 * inner) if self.biases else None,
            "w2_bias": source.normal(self.experts, hidden) if self.biases else None,
        }
        options = {
            "activation": self.activation,
            "apply_router_weight_on_input": self.weight_on_input,
            "routed_scaling_factor": self.scaling,
        }
        x = laid_out(source.normal(self.tokens, hidden), self.layout)
        return Call(SimpleNamespace(num_experts=self.experts), (x, w13, w2, weights, ids), {**options, **biases})


def _moe_cases() -> Iterator[Case]:
    forms = [
        _Experts("gelu", activation="gelu"),
        _Experts("biases", biases=True),
        _Experts("weight on the input", weight_on_input=True, top_k=1),
        _Experts("scaling factor", scaling=2.5),
        _Experts("experts of other ranks", elsewhere=True, tokens=64),
        _Experts("one token of experts of other ranks", elsewhere=True, tokens=1, top_k=1),
        _Experts("experts without tokens", experts=60, top_k=4),
        _Experts("biases, gelu, scaling, other ranks, int64", "gelu", False, True, 0.5, True, index=torch.int64),
    ]
    forms += [_Experts(layout.value, tokens=tokens, layout=layout) for tokens in TOKENS for layout in Layout]
    for form, dtype in product(forms, DTYPES):
        yield _case("fused_moe", form.name, dtype, form.tokens, form)


def _all_cases() -> Iterator[Case]:
    yield from _activation_cases("silu_and_mul", SimpleNamespace())
    for approximate in ("tanh", "none"):
        yield from _activation_cases("gelu_and_mul", SimpleNamespace(approximate=approximate))
    yield from _norm_cases("rms_norm")
    yield from _norm_cases("gemma_rms_norm")
    yield from _rotary_cases()
    yield from _mrotary_cases()
    yield from _topk_cases()
    yield from _moe_cases()


def cases(op_name: str) -> tuple[Case, ...]:
    """Every case of an operator.

    Raises:
        ValueError: an operator that has none.
    """
    found = tuple(case for case in _all_cases() if case.op_name == op_name)
    if not found:
        raise ValueError(f"no cases for operator {op_name!r}; there are some for {', '.join(FORMULAS)}")
    return found
