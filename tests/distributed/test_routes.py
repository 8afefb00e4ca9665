"""What a FlagCX library cannot do goes another way on all ranks alike; what it refuses as wrong is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_fl.comm.backends.flagcx import FlagCXError
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import call_everything, communicator_of_all
from tests.distributed.libraries import INVALID_ARGUMENT, NOT_SUPPORTED, Answer, answering, without

# The operation of a transport and the function of the library that carries it.
FUNCTIONS = {
    "all_reduce": "flagcxAllReduce",
    "all_gather": "flagcxAllGather",
    "reduce_scatter": "flagcxReduceScatter",
    "reduce": "flagcxReduce",
    "broadcast": "flagcxBroadcast",
    "gather": "flagcxGather",
}


def _routes(context: RankContext) -> dict[str, str]:
    communicator = communicator_of_all(context)
    assert communicator.backend == "flagcx"
    call_everything(communicator)
    communicator.destroy()
    return communicator.exceptions()


@pytest.mark.parametrize("operation", FUNCTIONS)
def test_a_function_that_one_rank_lacks(operation: str, hostcx: Path, tmp_path: Path) -> None:
    """Case 27. Given a library without one function on one rank, when the ranks make a communicator, then that
    operation takes the same other route on all of them, and all operations are right."""
    lacking = without(hostcx, tmp_path, [FUNCTIONS[operation]])
    routes = run_ranks(_routes, 3, env=lambda rank: {"FLAGCX_PATH": str(lacking if rank == 1 else hostcx)})
    assert routes == [{operation: "torch"}] * 3


def test_point_to_point_that_one_rank_lacks(hostcx: Path, tmp_path: Path) -> None:
    """Case 27. Given a library that cannot send on one rank, when the ranks make a communicator, then sends and
    receives take the same other route on all of them."""
    lacking = without(hostcx, tmp_path, ["flagcxSend"])
    routes = run_ranks(_routes, 2, env=lambda rank: {"FLAGCX_PATH": str(lacking if rank == 1 else hostcx)})
    assert routes == [{"send": "torch", "recv": "torch"}] * 2


@pytest.mark.parametrize("operation", FUNCTIONS)
def test_not_supported_is_a_capability(operation: str, hostcx: Path, tmp_path: Path) -> None:
    """Case 27. Given a library that answers NotSupported for one operation, when the ranks make a communicator, then
    that operation takes the same other route on all of them."""
    library = answering(hostcx, tmp_path, {FUNCTIONS[operation]: Answer(NOT_SUPPORTED)})
    assert run_ranks(_routes, 3, env={"FLAGCX_PATH": str(library)}) == [{operation: "torch"}] * 3


def _invalid(context: RankContext) -> str:
    communicator = communicator_of_all(context)
    assert communicator.backend == "flagcx" and communicator.exceptions() == {}
    kept = torch.tensor([context.rank + 1.0])
    with pytest.raises(FlagCXError) as raised:
        communicator.all_reduce(kept)
    assert kept.item() == context.rank + 1.0  # nothing else was tried on it
    assert communicator.broadcast(kept, src=1).item() == 2.0
    return str(raised.value)


def test_invalid_argument_is_an_error(hostcx: Path, tmp_path: Path) -> None:
    """Case 27. Given a library that answers InvalidArgument to a call, when the ranks call it, then each gets that
    error with the operation and its arguments, and no other route is taken."""
    library = answering(hostcx, tmp_path, {"flagcxAllReduce": Answer(INVALID_ARGUMENT, after=1)})
    texts = run_ranks(_invalid, 2, env={"FLAGCX_PATH": str(library)})
    assert all("all_reduce(dtype=FLOAT32" in text and "InvalidArgument" in text for text in texts), texts


def _refused_at_creation(context: RankContext) -> tuple[str, list[str]]:
    communicator = communicator_of_all(context)
    call_everything(communicator)
    communicator.destroy()
    return communicator.backend, [entry.reason for entry in communicator.agreed.passed_over]


def test_invalid_argument_at_creation(hostcx: Path, tmp_path: Path) -> None:
    """Case 27. Given a library that answers InvalidArgument on one rank while the communicator is made, when the
    ranks agree, then all take the next backend and say which rank could not and why."""
    library = answering(hostcx, tmp_path, {"flagcxBroadcast": Answer(INVALID_ARGUMENT)})
    environment = {"FLAGCX_PATH": str(library)}
    found = run_ranks(_refused_at_creation, 2, env=environment)
    for backend, reasons in found:
        assert backend == "torch"
        assert any("creation failed on" in reason and "InvalidArgument" in reason for reason in reasons), reasons


def test_not_supported_on_one_rank(hostcx: Path, tmp_path: Path) -> None:
    """Case 27. Given libraries of which one answers NotSupported, when the ranks agree, then none hangs, all have the
    same backend, and every operation is right: the others' call had waited for the rank that refused."""
    library = answering(hostcx, tmp_path, {"flagcxGather": Answer(NOT_SUPPORTED)})
    found = run_ranks(_refused_at_creation, 3, env=lambda rank: {"FLAGCX_PATH": str(hostcx if rank else library)})
    assert [backend for backend, _ in found] == [found[0][0]] * 3


def test_a_library_that_reduces_nothing(hostcx: Path, tmp_path: Path) -> None:
    """Given a library whose all_reduce says success and does nothing, when the ranks agree, then all take the next
    backend and say why."""
    library = answering(hostcx, tmp_path, {"flagcxAllReduce": Answer(0)})
    found = run_ranks(_refused_at_creation, 2, env={"FLAGCX_PATH": str(library)})
    for backend, reasons in found:
        assert backend == "torch"
        assert any(
            "all_reduce of 1 over 2 ranks gave 1.0" in reason and "does not reduce" in reason for reason in reasons
        )
