"""Layer 3: every collective and point-to-point transfer of a group, on the backend its ranks agreed on.

``from sglang_fl.comm import CommunicatorFL``; the name is resolved when it is used, so that what needs only the
errors or the FlagCX binding does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_fl.comm.communicator import CommunicatorFL, dump_calls

__all__ = ["CommunicatorFL", "dump_calls"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from sglang_fl.comm import communicator

        return getattr(communicator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
