"""FlagGems' kernels by name: where each lives, which parameters it must have, and the plain Triton function in it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """Where a kernel lives, and the parameters that the calls in ``impl`` are written for.

    FlagGems promises nothing about its kernels' parameters from one version to the next: another list makes the
    operator unavailable, in the place of a wrong call. Empty: not a kernel with positional parameters of its own.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()


class KernelMissing(LookupError):  # noqa: N818 - a lookup that failed, reported as a reason
    """This version of FlagGems has no such kernel, or one with other parameters."""


KERNELS: dict[str, Kernel] = {
    "topk_softmax": Kernel(
        "flag_gems.fused.topk_softmax",
        "topk_gating_softmax_kernel",
        (
            *("input_ptr", "finished_ptr", "output_ptr", "indices_ptr", "source_rows_ptr", "num_rows", "k"),
            *("num_experts", "start_expert", "end_expert", "renormalize", "INDEX_TY"),
            *("BLOCK_SIZE_ROWS", "BLOCK_SIZE_EXPERTS"),
        ),
    ),
    "grouped_topk": Kernel("flag_gems.fused.grouped_topk", "grouped_topk"),
}

# The kernels of FlagGems that an operator's implementation here may call; the others have kernels of this backend.
OPERATOR_KERNELS: dict[str, tuple[str, ...]] = {
    "silu_and_mul": (),
    "gelu_and_mul": (),
    "rms_norm": (),
    "gemma_rms_norm": (),
    "rotary_embedding": (),
    "topk": ("topk_softmax", "grouped_topk"),
}


class LoadedKernels:
    """``loaded.topk_softmax`` is that kernel, imported on first use; afterwards it is one attribute.

    What ``libentry`` and ``autotune`` wrap is taken out of them: their Python costs more than the launch, their
    cache grows with every new stride, and tuning may not start while a graph is captured. The block sizes and the
    number of warps are chosen in ``impl``.
    """

    def __getattr__(self, name: str) -> Any:
        """Load kernel ``name``; only called while it is not loaded.

        Raises:
            KernelMissing: see there.
        """
        kernel = KERNELS.get(name)
        if kernel is None:
            raise AttributeError(name)
        loaded = load(kernel)
        setattr(self, name, loaded)
        return loaded


def load(kernel: Kernel) -> Any:
    """Import ``kernel`` and take it out of its wrappers.

    Raises:
        KernelMissing: FlagGems has no such kernel, or one with other parameters than ``kernel.parameters``.
    """
    try:
        loaded = getattr(importlib.import_module(kernel.module), kernel.name)
    except (ImportError, AttributeError) as error:
        raise KernelMissing(f"FlagGems has no {kernel.module}.{kernel.name}: {error}") from error
    if not kernel.parameters:
        return loaded
    found = tuple(loaded.arg_names)
    if found != kernel.parameters:
        raise KernelMissing(
            f"FlagGems' {kernel.module}.{kernel.name} takes {', '.join(found)}; "
            f"calls here are written for {', '.join(kernel.parameters)}"
        )
    return _innermost(loaded)


def _innermost(function: Any) -> Any:
    # Wrappers (LibEntry, Autotuner) keep what they wrap in fn; a jit function keeps its Python function there.
    while hasattr(function.fn, "fn"):
        function = function.fn
    return function


loaded = LoadedKernels()
