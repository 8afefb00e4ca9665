"""Rotary embedding on sgl_kernel's kernel, which computes in the query's dtype with a cache of that dtype."""

from __future__ import annotations

from typing import Any

import torch

from sglang_fl.dispatch.backends.vendor.cuda.kernels import kernels
from sglang_fl.dispatch.types import NotSupportedError

# Sixteen-bit arithmetic rounds more than the last step, and the cache, which is float32, may not be converted.
DTYPES = frozenset({"float32"})


def rotary_embedding_cuda(
    obj: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate float32 query and key with the float32 cache of ``obj``; see the standard signature for shapes.

    Raises:
        NotSupportedError: another dtype, cos no view of ``obj.cos_sin_cache``, or heads that lie differently in
            query and key: the kernel takes one stride for both.
    """
    cache = getattr(obj, "cos_sin_cache", None)
    if cache is None or cache.data_ptr() != cos.data_ptr() or not cache.is_contiguous():
        raise NotSupportedError("rotary_embedding: sgl_kernel reads the whole cache, and cos is no view of the layer's")
    if not inplace:
        query, key = query.contiguous().clone(), key.contiguous().clone()
    _check(query, key, cache)
    if query.shape[0]:
        width = query.shape[-1]
        kernels.rotary_embedding(position_ids.long(), query, key, width, cache, not rotary_interleaved)
    return query, key


def _check(query: torch.Tensor, key: torch.Tensor, cache: torch.Tensor) -> None:
    width = query.shape[-1]
    right = (
        query.dtype is key.dtype is cache.dtype is torch.float32
        and query.dim() == key.dim() == 3
        and width == key.shape[-1] == cache.shape[-1]
        and query.stride(2) == key.stride(2) == 1
        and query.shape[1] % key.shape[1] == 0
        and query.stride(1) == key.stride(1)
    )
    if not right:
        raise NotSupportedError(
            f"rotary_embedding: query {tuple(query.shape)} {query.dtype} strides {query.stride()}, key "
            f"{tuple(key.shape)} {key.dtype} strides {key.stride()}, cache {tuple(cache.shape)} {cache.dtype}; "
            "sgl_kernel is right for float32, three dimensions and equal strides between heads"
        )
