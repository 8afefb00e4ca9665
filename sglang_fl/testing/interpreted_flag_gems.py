"""The flagos backend's kernels on the CPU, by Triton's interpreter: for tests of values on machines without a GPU.

``python -m sglang_fl.testing.interpreted_flag_gems OPERATOR`` runs the operator's cases and prints as JSON how many ran
and what was wrong. A process of its own, because FlagGems and Triton are changed for it:

- FlagGems is told that there is a Hopper GPU, without which it does not import;
- Triton's own functions are made interpretable by ``TRITON_INTERPRET=1`` while they are imported; kernels are not, as
  FlagGems' wrappers take compiled ones only, and are interpreted when they are called.

The interpreter truncates to bfloat16 where a GPU rounds, and knows no dependent launch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from sglang_fl.dispatch.backends.flaggems import register_ops
from sglang_fl.dispatch.registry import OpRegistry
from sglang_fl.dispatch.types import NotSupportedError, OpImpl
from sglang_fl.testing.operator_cases import Case, cases
from sglang_fl.testing.operator_checks import problems

OPERATORS = ("silu_and_mul", "gelu_and_mul", "rms_norm", "gemma_rms_norm", "rotary_embedding", "topk")
DTYPES = (torch.float32, torch.float16)
# A program of the interpreter takes milliseconds.
MOST_TOKENS = 7


def prepare() -> None:
    """Import Triton and FlagGems, changed as the module's docstring says."""
    os.environ["TRITON_INTERPRET"] = "1"
    # It checks how Triton was imported, and the interpreter would import it late.
    importlib.import_module("triton.experimental.gluon")
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    del os.environ["TRITON_INTERPRET"]

    @cache
    def interpreted(function: Any) -> Any:
        return InterpretedFunction(function)

    changes = {
        "run": lambda self, *args, **kwargs: interpreted(self.fn).run(*args, **kwargs),
        "__call__": lambda self, *args, **kwargs: interpreted(self.fn)(*args, **kwargs),
        "cache_key": property(lambda self: self.fn.__qualname__),
    }
    for name, change in changes.items():
        setattr(JITFunction, name, change)
    pretend_a_hopper_gpu()
    importlib.import_module("flag_gems")


def pretend_a_hopper_gpu() -> None:
    """Answer what FlagGems asks of CUDA while it is imported."""
    os.environ["GEMS_VENDOR"] = "nvidia"
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=2**26)
    answers = {
        "is_available": lambda: True,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: properties.name,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def implementation(op_name: str) -> OpImpl:
    """The flagos implementation of the operator."""
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    return registry.implementations(op_name)[0]


def interpretable(case: Case) -> bool:
    """Whether the interpreter gives what a GPU gives, in reasonable time."""
    return case.dtype in DTYPES and case.tokens <= MOST_TOKENS


def run(op_name: str) -> dict[str, Any]:
    """The cases of an operator: how many ran, which were refused, what was wrong."""
    impl = implementation(op_name)
    ran, refused, found = 0, [], []
    for case in filter(interpretable, cases(op_name)):
        try:
            found += problems(case, impl.fn, roundings=0)
        except NotSupportedError:
            refused.append(case.label)
        else:
            ran += 1
    return {"ran": ran, "refused": refused, "problems": found}


if __name__ == "__main__":
    prepare()
    sys.stdout.write(json.dumps(run(sys.argv[1])) + "\n")
