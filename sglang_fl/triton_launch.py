"""Launch a Triton kernel without Triton's Python before each launch: bound once, then one call into its C launcher.

``kernel[grid](...)`` binds arguments, looks at each for what the kernel is specialised on, and builds a string to look
the compiled kernel up: tens of microseconds a call. A caller that knows what a launch depends on keeps it by a key of
its own instead::

    key = (x.dtype, width, x.get_device(), specialisation(x.data_ptr(), x.stride(0)))
    launch = launches.get(key) or launches.setdefault(key, bind(kernel, (x, out, x.stride(0)), constants, options))
    launch(rows, 1, x, out, x.stride(0))

Triton itself is imported when something is bound. Binding compiles and loads the kernel: do it before a stream is
captured, as any Triton kernel must have run once before. Triton's debug and instrumentation settings count as they
were then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch

logger = logging.getLogger("sglang_fl.triton_launch")

# launch(grid_x, grid_y, *arguments): the arguments are the kernel's before its constants.
Launch = Callable[..., None]

# What a bound launch calls was read in these versions: CompiledKernel.run and its arguments, and the two hooks.
TRITON_VERSIONS = ("3.6.",)
ALIGNMENT = 16
_taking_addresses: WeakSet[Launch] = WeakSet()
# Bits that are 0 in every integer that is a multiple of 16 below 2**31: most are, and are of class 0.
UNUSUAL = ~(2**31 - ALIGNMENT)


def takes_addresses(launch: Launch) -> bool:
    """Whether ``launch`` also takes ``tensor.data_ptr()`` in the place of a tensor. A caller that has the address at
    hand saves Triton asking the tensor and the driver for it.
    """
    return launch in _taking_addresses


def specialisation(*integers: int) -> tuple[int, ...]:
    """For each address or integer argument, its class: launches of one compiled kernel agree in all of them.

    Triton compiles integers that are 1, multiples of 16, or beyond 32 bits into kernels of their own, and addresses
    that are multiples of 16.

    Source: Triton 3.6.0, ``native_specialize_impl`` and ``JITFunction.run``.
    """
    return tuple(_class_of(integer) for integer in integers)


def _class_of(integer: int) -> int:
    if not integer & UNUSUAL:
        return 0
    beyond_32_bits = 4 * (not -(2**31) <= integer < 2**31)
    return beyond_32_bits + (1 if integer == 1 else 2 if integer % ALIGNMENT else 3)


def bind(
    kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, Any], device: int
) -> Launch:
    """A function that launches ``kernel`` for arguments of the same dtypes and :func:`specialisation` as these.

    It enqueues on the current stream of ``device``. Profilers' launch hooks of Triton are called as ever. Where it
    cannot do better, because the kernel is interpreted or Triton is of a version whose launcher was not read, it is the
    ordinary launch; the latter is logged once.

    Args:
        kernel: what ``triton.jit`` made; its constants come after its other parameters.
        arguments: those other parameters, tensors on ``device`` and numbers.
        constants: name to value of the ``tl.constexpr`` parameters, all of them.
        options: of the compilation, such as num_warps.
        device: index of the CUDA device; -1 for an interpreted kernel on the CPU.

    Raises:
        ValueError: the constants are not the last parameters.
    """
    names = list(kernel.arg_names)
    if set(names[len(arguments) :]) != set(constants):
        raise ValueError(
            f"{kernel.__name__}{tuple(names)}: {len(arguments)} arguments and then {', '.join(constants)}; "
            "constants must be the last parameters, and all of them given"
        )
    if device < 0:
        return _ordinary(kernel, constants, options)
    reason = _other_interface(kernel)
    if reason:
        _say_once(reason)
        return _on_device(_ordinary(kernel, constants, options), device)
    with torch.cuda.device(device):
        compiled = kernel.warmup(*arguments, grid=(1,), **constants, **options)
        return _bound(compiled, tuple(constants[name] for name in names[len(arguments) :]), device)


def _ordinary(kernel: Any, constants: Mapping[str, Any], options: Mapping[str, Any]) -> Launch:
    def launch(grid_x: int, grid_y: int, *arguments: Any) -> None:
        kernel[(grid_x, grid_y)](*arguments, **constants, **options)

    return launch


def _on_device(launch: Launch, device: int) -> Launch:
    def on_device(*arguments: Any) -> None:
        with torch.cuda.device(device):
            launch(*arguments)

    return on_device


def _bound(compiled: Any, constants: tuple[Any, ...], device: int) -> Launch:
    from triton import knobs

    # "run" loads the kernel onto the device; "function" is its handle there.
    run = compiled.run
    function, metadata, describe = compiled.function, compiled.packed_metadata, compiled.launch_metadata
    runtime = knobs.runtime
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def launch(grid_x: int, grid_y: int, *arguments: Any) -> None:
        if current_device() != device:
            elsewhere(grid_x, grid_y, *arguments)
            return
        stream = current_stream(device)
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            about = describe((grid_x, grid_y, 1), stream, *arguments, *constants)
            run(grid_x, grid_y, 1, stream, function, metadata, about, enter, leave, *arguments, *constants)
        else:
            run(grid_x, grid_y, 1, stream, function, metadata, None, None, None, *arguments, *constants)

    elsewhere = _on_device(launch, device)
    _taking_addresses.add(launch)
    return launch


def _other_interface(kernel: Any) -> str:
    """Why a kernel of this Triton is launched in the ordinary way; "" if it need not be."""
    import triton

    if not triton.__version__.startswith(TRITON_VERSIONS):
        read = ", ".join(f"{version}x" for version in TRITON_VERSIONS)
        return f"Triton {triton.__version__} is installed, and launches without its Python were written for {read}"
    if not hasattr(kernel, "warmup") or kernel.pre_run_hooks:
        return f"{kernel.__name__} has hooks that run before each launch"
    return ""


@cache
def _say_once(reason: str) -> None:
    logger.warning("[sglang_fl] Triton kernels are launched in the ordinary way, at more host time a call: %s", reason)
