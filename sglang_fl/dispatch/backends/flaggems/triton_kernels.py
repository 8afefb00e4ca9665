"""Triton kernels for what FlagGems' own do slower than the memory allows: gated activations, norms, rotary embedding.

Everything is computed in float32 and rounded once. Sizes of a model are constants of the compiled kernel, so that
loads are 16 bytes a thread wherever tensors are aligned. Offsets are 64 bits. Import needs Triton.

With ``dependent`` a kernel is launched while the one before it still runs (programmatic dependent launch, from sm_90
on). It waits for that one before it touches any memory, as every program of every kernel here does: so what came before
the one before has ended too, and reusing freed memory is as safe as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda

_Decorator = Callable[[Callable[..., Any]], Any]
_jit: _Decorator = triton.jit
# Numbers that change from call to call, and addresses that one element is read from, make no kernels of their own.
_jit_norm: _Decorator = triton.jit(do_not_specialize=["row_count"])
_jit_rotary: _Decorator = triton.jit(
    do_not_specialize=["position_stride"], do_not_specialize_on_alignment=["position_ptr"]
)

SILU, GELU_TANH, GELU_NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@_jit
def _wait(dependent: tl.constexpr) -> None:
    if dependent:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@_jit
def _activated(gate: tl.tensor, form: tl.constexpr) -> tl.tensor:
    if form == SILU:
        return gate / (1 + tl.exp(-gate))
    if form == GELU_NONE:
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    # 0.5 * (1 + tanh(y)) is 1 / (1 + exp(-2 y)), which has no difference of nearly equal numbers; y by sqrt(2 / pi).
    twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(-twice))


@_jit
def gated_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    columns: tl.constexpr,
    block: tl.constexpr,
    form: tl.constexpr,
    dependent: tl.constexpr,
) -> None:
    """``act(x[row, :columns]) * x[row, columns:]``; grid (rows, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    x_ptr += row * x_stride
    _wait(dependent)
    gate = tl.load(x_ptr + column, inside, 0.0).to(tl.float32)
    up = tl.load(x_ptr + columns + column, inside, 0.0).to(tl.float32)
    result = _activated(gate, form) * up
    tl.store(out_ptr + row * columns + column, result.to(out_ptr.dtype.element_ty), inside)


@_jit_norm
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    row_count: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    with_residual: tl.constexpr,
    one_plus_weight: tl.constexpr,
    dependent: tl.constexpr,
) -> None:
    """The norm of ``rows`` rows, held in registers; grid (blocks of rows).

    With a residual, whose rows are contiguous, its sum with x is normed as it is in float32, and stored in it. The
    result may be x itself: no element is read again after it was written, as no two threads hold the same one where
    ``rows * block`` is at least the number of threads.
    """
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (row < row_count) & (column < width)
    if rows == 1:  # every program has its row: the mask is the columns' alone
        inside = column < width
    _wait(dependent)
    x = tl.load(x_ptr + row * x_stride + column, inside, 0.0).to(tl.float32)
    if with_residual:
        at = residual_ptr + row * width + column
        x += tl.load(at, inside, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, column < width, 0.0, eviction_policy="evict_last").to(tl.float32)
    if with_residual:
        tl.store(at, x.to(residual_ptr.dtype.element_ty), inside)
    if one_plus_weight:
        weight += 1
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    tl.store(out_ptr + row * width + column, (x * scale * weight).to(out_ptr.dtype.element_ty), inside)


@_jit
def _rotate(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    first_head: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    head_count: tl.constexpr,
    pairs: tl.constexpr,
    heads: tl.constexpr,
    block: tl.constexpr,
    interleaved: tl.constexpr,
    several_warps: tl.constexpr,
) -> None:
    head = first_head + tl.arange(0, heads)[:, None]
    x_at, out_at = x_ptr + head * x_stride, out_ptr + head * out_stride
    if interleaved:
        column = tl.arange(0, 2 * block)[None, :]
        inside = (head < head_count) & (column < 2 * pairs)
        both = tl.load(x_at + column, inside, 0.0).to(tl.float32)
        first, second = tl.split(both.reshape(heads, block, 2))
        if several_warps:
            tl.debug_barrier()
        rotated = tl.join(first * cos - second * sin, second * cos + first * sin).reshape(heads, 2 * block)
        tl.store(out_at + column, rotated.to(out_ptr.dtype.element_ty), inside)
    else:
        column = tl.arange(0, block)[None, :]
        inside = (head < head_count) & (column < pairs)
        first = tl.load(x_at + column, inside, 0.0).to(tl.float32)
        second = tl.load(x_at + pairs + column, inside, 0.0).to(tl.float32)
        # In place, a warp may hold what another one stores: all have loaded before any stores.
        if several_warps:
            tl.debug_barrier()
        tl.store(out_at + column, (first * cos - second * sin).to(out_ptr.dtype.element_ty), inside)
        tl.store(out_at + pairs + column, (second * cos + first * sin).to(out_ptr.dtype.element_ty), inside)


@_jit_rotary
def rotary_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    out_query_ptr: tl.tensor,
    out_key_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    position_ptr: tl.tensor,
    position_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    out_query_stride: tl.tensor,
    out_query_head_stride: tl.tensor,
    out_key_stride: tl.tensor,
    out_key_head_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    query_heads: tl.constexpr,
    key_heads: tl.constexpr,
    pairs: tl.constexpr,
    heads: tl.constexpr,
    block: tl.constexpr,
    interleaved: tl.constexpr,
    several_warps: tl.constexpr,
    dependent: tl.constexpr,
) -> None:
    """Rotate ``heads`` heads of one token, by its angles in the tables; grid (tokens, blocks of heads).

    The blocks of query heads come before those of key heads. The results may be query and key themselves.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (query_heads + heads - 1) // heads
    pair = tl.arange(0, block)[None, :]
    _wait(dependent)
    position = tl.load(position_ptr + token * position_stride).to(tl.int64)
    cos = tl.load(cos_ptr + position * cos_stride + pair, pair < pairs, 0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * sin_stride + pair, pair < pairs, 0.0).to(tl.float32)
    if part < query_parts:
        _rotate(
            query_ptr + token * query_stride,
            out_query_ptr + token * out_query_stride,
            query_head_stride,
            out_query_head_stride,
            part * heads,
            cos,
            sin,
            query_heads,
            pairs,
            heads,
            block,
            interleaved,
            several_warps,
        )
    else:
        _rotate(
            key_ptr + token * key_stride,
            out_key_ptr + token * out_key_stride,
            key_head_stride,
            out_key_head_stride,
            (part - query_parts) * heads,
            cos,
            sin,
            key_heads,
            pairs,
            heads,
            block,
            interleaved,
            several_warps,
        )
