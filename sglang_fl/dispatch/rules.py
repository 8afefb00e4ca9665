"""What decides, beyond availability, whether an implementation is right: the layer, the dtype, the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from sglang_fl.dispatch.registry import parse_arch
from sglang_fl.dispatch.types import OpImpl


def refusal(impl: OpImpl, obj: Any = None, dtype: torch.dtype | None = None) -> str:
    """Why ``impl`` is wrong for ``obj``, the layer, and ``dtype``, that of its input; empty if nothing says so.

    What is None is not known yet: its rule says nothing then; see :func:`has_open_rule`.
    """
    return (
        _layer_refusal(impl, obj) or _dtype_refusal(impl, dtype) or (_is_arch_known(obj) and _arch_refusal(impl)) or ""
    )


def has_open_rule(impl: OpImpl, obj: Any = None, dtype: torch.dtype | None = None) -> bool:
    """Whether a rule of ``impl`` can be decided only in a call."""
    return (
        (obj is None and impl.supports is not None)
        or (dtype is None and impl.supported_dtypes is not None)
        or (impl.min_arch is not None and not _is_arch_known(obj))
    )


def refusal_of_call(impl: OpImpl, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """:func:`refusal` for one call: the layer is the first argument, the dtype that of the first floating tensor."""
    values = [*args, *kwargs.values()]
    obj = kwargs.get("obj", args[0] if args else None)
    floating = (value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())
    return _layer_refusal(impl, obj) or _dtype_refusal(impl, next(floating, None)) or _arch_refusal(impl)


def _layer_refusal(impl: OpImpl, obj: Any) -> str:
    if obj is None or impl.supports is None:
        return ""
    try:
        return impl.supports(obj)
    except Exception as error:  # noqa: BLE001 - third-party code; the reason is kept and reported
        return f"its supports raised {type(error).__name__}: {error}"


def _dtype_refusal(impl: OpImpl, dtype: torch.dtype | None) -> str:
    if dtype is None or impl.supported_dtypes is None:
        return ""
    supported = {_dtype_name(name) for name in impl.supported_dtypes}
    if _dtype_name(dtype) in supported:
        return ""
    return f"the input is {_dtype_name(dtype)}; it does {', '.join(sorted(supported))}"


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _is_arch_known(obj: Any) -> bool:
    # Asking CUDA before a layer exists would initialise it, which a process that only looks must not do.
    return obj is not None or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _arch_refusal(impl: OpImpl) -> str:
    capability = _current_capability() if impl.min_arch is not None else None
    if impl.min_arch is None or capability is None or capability >= parse_arch(impl.min_arch):
        return ""
    return f"the device has compute capability {capability[0]}.{capability[1]}; it needs {impl.min_arch}"


def _current_capability() -> tuple[int, int] | None:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return _capability(torch.cuda.current_device())


@cache
def _capability(device: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor
