"""Rotary embedding on a Triton kernel, over the whole cache as it is: no gather, no conversion."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.flaggems.choices import ROTARY, Rotary, by_bits
from sglang_fl.dispatch.backends.flaggems.impl.shapes import compile_options, launches_dependently, next_power_of_two
from sglang_fl.dispatch.types import NotSupportedError
from sglang_fl.triton_launch import UNUSUAL, Launch, bind, specialisation, takes_addresses

# Of a key: by the length in bits of the number of tokens, how to launch, whether by addresses, and the blocks of heads.
_Launches = tuple[tuple[Launch, bool, int], ...]
_launches: dict[Any, _Launches] = {}


def rotary_embedding_flaggems(
    obj: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key, computed in float32; see the standard signature for shapes.

    Raises:
        NotSupportedError: query or key is not [T, heads, rotary_dim] of one dtype, or one of them or the tables are not
            contiguous in their last dimension, or the tables are too narrow.
    """
    _check(query, key, cos, sin)
    out_query = query if inplace else torch.empty(query.shape, dtype=query.dtype, device=query.device)
    out_key = key if inplace else torch.empty(key.shape, dtype=key.dtype, device=key.device)
    tokens, heads, width = query.shape
    if not tokens:
        return out_query, out_key
    tensors = (query, key, out_query, out_key, cos, sin)
    strides = (
        *query.stride()[:2],
        *key.stride()[:2],
        *out_query.stride()[:2],
        *out_key.stride()[:2],
        cos.stride(0),
        sin.stride(0),
    )
    addresses = [tensor.data_ptr() for tensor in tensors]
    unusual = 0
    for address in addresses:
        unusual |= address & 15
    for stride in strides:
        unusual |= stride & UNUSUAL
    form = (
        *(rotary_interleaved, heads, key.shape[1], width, query.dtype, cos.dtype, sin.dtype),
        *(position_ids.dtype, query.get_device()),
        unusual and specialisation(*addresses, *strides),
    )
    arguments = (*tensors, position_ids, position_ids.stride(0), *strides)
    launches = _launches.get(form) or _bind(form, rotary_interleaved, arguments)
    launch, by_address, blocks = launches[tokens.bit_length()]
    if by_address:
        launch(tokens, blocks, *addresses, position_ids.data_ptr(), position_ids.stride(0), *strides)
    else:
        launch(tokens, blocks, *arguments)
    return out_query, out_key


def _bind(form: Any, interleaved: bool, arguments: tuple[Any, ...]) -> _Launches:
    heads = arguments[0].shape[1] + arguments[1].shape[1]
    return _launches.setdefault(
        form, by_bits(ROTARY, heads, lambda choice: bind_rotary(choice, interleaved, arguments))
    )


def bind_rotary(choice: Rotary, interleaved: bool, arguments: tuple[Any, ...]) -> tuple[Launch, bool, int]:
    """How to launch the kernel for arguments like these: launch(tokens, blocks, *arguments), whether addresses do in
    the tensors' place, and the blocks of heads.

    ``arguments``: query, key, their results, cos, sin, positions, the positions' stride, and the strides of tokens and
    of heads of the first four, and of positions of the tables.
    """
    from sglang_fl.dispatch.backends.flaggems import triton_kernels as kernels

    query, key = arguments[:2]
    device = query.get_device()
    dependent = choice.dependent and launches_dependently(device)
    pairs = query.shape[2] // 2
    constants = {
        **{"query_heads": query.shape[1], "key_heads": key.shape[1], "pairs": pairs, "heads": choice.heads},
        **{"block": next_power_of_two(pairs), "interleaved": interleaved, "several_warps": choice.warps > 1},
        "dependent": dependent,
    }
    options = compile_options(choice.warps, dependent)
    launch = bind(kernels.rotary_kernel, arguments, constants, options, device)
    blocks = -(-query.shape[1] // choice.heads) - (-key.shape[1] // choice.heads)
    return launch, takes_addresses(launch), blocks


def _check(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    width = query.shape[-1]
    if query.dim() != 3 or key.dim() != 3 or key.shape[-1] != width or query.dtype != key.dtype:
        raise NotSupportedError(
            f"rotary_embedding: query {tuple(query.shape)} {query.dtype} and key {tuple(key.shape)} {key.dtype}; "
            "the kernel takes [T, heads, rotary_dim] of one dtype"
        )
    if query.stride(2) != 1 or key.stride(2) != 1:
        raise NotSupportedError(
            f"rotary_embedding: query and key have strides {query.stride()} and {key.stride()}; "
            "the kernel takes heads that are contiguous"
        )
    if cos.shape[-1] * 2 != width or cos.stride(-1) != 1 or sin.stride(-1) != 1:
        raise NotSupportedError(
            f"rotary_embedding: tables of shape {tuple(cos.shape)} and strides {cos.stride()}, {sin.stride()} for "
            f"a rotary_dim of {width}; the kernel takes [positions, rotary_dim / 2], contiguous in the last dimension"
        )
