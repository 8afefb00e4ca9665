"""What a rank of a test runs: module-level functions, so that fresh interpreters can run them too."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from sglang_fl.comm.backends.flagcx import FlagCXError
from sglang_fl.testing.ranks import RankContext

from . import scenarios
from .matrix import MatrixReport, run_matrix
from .session import opened
from .torch_reference import TorchSession, is_supported
from .uneven import all_to_all_v

_SMALL_COUNTS = (0, 1, 7, 4096)


def matrix(context: RankContext) -> MatrixReport:
    """The matrix on the library that FLAGCX_PATH names."""
    with opened(context) as session:
        return run_matrix(context, session)


def matrix_on_torch(context: RankContext) -> MatrixReport:
    """The matrix on torch.distributed's gloo backend."""
    return run_matrix(context, TorchSession(context), _SMALL_COUNTS, is_supported)


def uneven(context: RankContext) -> list[str]:
    """all_to_all_v on the library that FLAGCX_PATH names."""
    with opened(context) as session:
        return all_to_all_v(context, session)


def scenario(context: RankContext, name: str) -> None:
    """One of the scenarios, by the name of its function."""
    with opened(context) as session:
        getattr(scenarios, name)(session)


def scenarios_in_turn(context: RankContext, names: Sequence[str]) -> dict[str, str]:
    """Several scenarios in one process, for devices whose start takes long; return those that failed, and how."""
    failed: dict[str, str] = {}
    for name in names:
        context.note(name)
        try:
            scenario(context, name)
        except (AssertionError, FlagCXError):
            failed[name] = f"rank {context.rank} of {context.world_size}: {traceback.format_exc()}"
    return failed
