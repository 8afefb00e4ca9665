"""What tests of the bridges share: SGLang ready for its layers, and a vendor by the public recipe that takes notes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sglang_fl.config import Settings, load_settings
from sglang_fl.dispatch import OpImpl, OpManager, OpRegistry, SelectionPolicy, configure, set_manager
from sglang_fl.dispatch.backends.reference import register_ops as reference
from sglang_fl.dispatch.registry import KNOWN_OPERATORS
from sglang_fl.dispatch.types import BackendImplKind, BackendPriority, NotSupportedError
from sglang_fl.sglang_hooks.operators.binding import Binder
from sglang_fl.sglang_hooks.operators.bridge import Owner
from sglang_fl.sglang_hooks.operators.layer import dispatch_hook
from sglang_fl.sglang_hooks.operators.lists import ClassLists

VENDOR = "my_chip"
Function = Callable[..., Any]


def _bind_is_available(fn: Function, is_available_fn: Callable[[], bool]) -> Function:
    """As the public recipe has it."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._is_available = is_available_fn  # type: ignore[attr-defined]
    return wrapper


@dataclass
class Chip:
    """A vendor that computes what the reference does, and notes each call.

    Attributes:
        calls: (operator, positional arguments, keyword arguments).
        refuses: operators whose every call it refuses before it touches an input.
        fails: operators whose every call raises this.
        scale: multiplies what it returns, for a planted error.
    """

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)
    fails: dict[str, Exception] = field(default_factory=dict)
    scale: float = 1.0

    def register_builtins(self, registry: Any) -> None:
        """What the vendor's ``register_ops.py`` does."""
        registry.register_many([self._impl(op_name) for op_name in KNOWN_OPERATORS])

    def called(self, op_name: str) -> int:
        """How often it was called for one operator."""
        return sum(name == op_name for name, _, _ in self.calls)

    def last(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the last call."""
        return self.calls[-1][1:]

    def _impl(self, op_name: str) -> OpImpl:
        compute = reference._OPERATORS[op_name]

        def fn(*args: Any, **kwargs: Any) -> Any:
            if op_name in self.refuses:
                raise NotSupportedError(f"{op_name} is not for this chip")
            self.calls.append((op_name, args, kwargs))
            if op_name in self.fails:
                raise self.fails[op_name]
            result = compute(*args, **kwargs)
            return result if self.scale == 1.0 else result * self.scale

        return OpImpl(
            op_name=op_name,
            impl_id=f"vendor.{VENDOR}",
            kind=BackendImplKind.VENDOR,
            fn=_bind_is_available(fn, lambda: True),
            vendor=VENDOR,
            priority=BackendPriority.VENDOR,
        )


@dataclass
class Layer2:
    """Layer 2, on, with the chip and the reference as the only backends."""

    chip: Chip
    manager: OpManager
    binder: Binder


def settings(**variables: str) -> Settings:
    """Settings of these variables alone."""
    return load_settings(variables, platform="cpu")


@functools.cache
def _own_dispatch() -> Function:
    """SGLang's own method, first asked for while nothing is hooked: one test's layer may lie within another's."""
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

    dispatch: Function = MultiPlatformOp.dispatch_forward
    return dispatch


@contextmanager
def layer2(
    policy: SelectionPolicy | None = None,
    *,
    lists: ClassLists | None = None,
    platform: str | None = "cpu",
    has_kernels: bool = False,
    **variables: str,
) -> Iterator[Layer2]:
    """Switch layer 2 on as the plugin does, with SGLang's own method as it is before; off again afterwards.

    Args:
        policy: by default the vendor first.
        lists: black and white list.
        platform, has_kernels: what SGLang's own method is taken for.
        variables: further settings.
    """
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

    chip, registry = Chip(), OpRegistry()
    chip.register_builtins(registry)
    reference.register_builtins(registry)
    binder = Binder(platform, has_kernels)
    manager = OpManager(registry, policy or SelectionPolicy(prefer="vendor"))
    hook = dispatch_hook(lists or ClassLists(), binder)
    own = _own_dispatch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MultiPlatformOp, "dispatch_forward", lambda self: hook.function(own, self))
        set_manager(manager)
        configure(settings(**variables))
        yield Layer2(chip, manager, binder)
    set_manager(None)
    configure(settings())


@contextmanager
def sglang_ready(**arguments: Any) -> Iterator[Any]:
    """SGLang's layers can be made: it has server arguments, takes the CPU for its device, compiles nothing."""
    from sglang.srt import server_args
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.rotary_embedding import base

    made = server_args.ServerArgs(model_path="dummy", **arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_args, "_global_server_args", made)
        patch.setattr(base, "_is_cpu", True)
        initialize_moe_config(made)
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            yield made
    torch.set_num_threads(threads)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 7) -> torch.Tensor:
    """Normal numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def method_of(layer: Any) -> str:
    """What runs the layer: the name of SGLang's own method, or "bridge" for ours."""
    method = layer._forward_method
    return "bridge" if isinstance(method.__self__, Owner) else str(method.__name__)
