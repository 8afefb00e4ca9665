"""Routes by size without SGLang: what carries a call, ranks that differ, and routes that cannot be used."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_fl.comm.errors import AgreementError
from sglang_fl.comm.sizes import SizedTransport
from sglang_fl.testing.ranks import RankContext, RanksFailed, run_ranks
from tests.distributed.counted import counted_group
from tests.distributed.groups import call_everything, communicator_of_all, group_of

LIMIT = 1024
NCCL_IS_MISSING = "route nccl left out: all ranks: the group's torch.distributed backend is gloo (device cpu), not nccl"


def _environment(hostcx: Path, routes: str, **more: str) -> dict[str, str]:
    return {"FLAGCX_PATH": str(hostcx), "SGLANG_FL_COMM_MODE": "fastest", "SGLANG_FL_COMM_ROUTES": routes, **more}


def _counted(context: RankContext) -> dict[str, dict[str, int]]:
    """The group of all ranks with counted routes: what carried how many calls of which operation."""
    communicator, clock = counted_group(context)
    size = context.world_size
    total = sum(range(1, size + 1))
    for elements in (0, 1, LIMIT // 4, LIMIT // 4 + 1, 5000):
        for dtype in (torch.float32, torch.bfloat16):
            mine = torch.full((elements,), context.rank + 1.0, dtype=dtype)
            assert torch.equal(communicator.all_reduce(mine.clone()), torch.full_like(mine, total))
            strided = torch.stack([mine, mine], 1)[:, 0]
            assert torch.equal(communicator.all_reduce(strided), torch.full_like(mine, total))
            gathered = communicator.all_gather(mine, dim=0)
            assert torch.equal(gathered, torch.cat([torch.full_like(mine, rank + 1.0) for rank in range(size)]))
            share = communicator.reduce_scatter_tensor(torch.empty_like(mine), mine.repeat(size))
            assert torch.equal(share, torch.full_like(mine, total))
    call_everything(communicator)
    communicator.destroy()
    found: dict[str, Counter[str]] = {}
    for (_, operation, backend), carried in clock.carried.items():
        found.setdefault(operation, Counter())[backend] += carried.calls
    return {operation: dict(counts) for operation, counts in found.items()}


def test_each_size_takes_its_route(hostcx: Path) -> None:
    """Given routes for small calls on torch, when sizes on both sides of the limit are summed, gathered and scattered,
    then every value is right and each call is carried by the route of its size, on all ranks alike."""
    routes = f"all_reduce=torch:{LIMIT};all_gather=torch:{LIMIT}@eager|flagcx;reduce_scatter=torch:{LIMIT}@graph"
    found = run_ranks(_counted, 2, env=_environment(hostcx, routes))
    assert found[0] == found[1]
    # float32: 0, 4 and 1024 bytes are small, 1028 and 20000 are not; bfloat16: one more is small. Twice each, and
    # one call of call_everything.
    assert found[0]["all_reduce"] == {"torch": 2 * (3 + 4) + 1, "flagcx": 2 * (2 + 1)}
    # Of the gathered output: 0, 8 bytes; and 0, 4, 1024 and for bfloat16 1028 is not.
    assert found[0]["all_gather"] == {"torch": 2 + 3 + 1, "flagcx": 3 + 2}
    assert set(found[0]["reduce_scatter"]) == {"flagcx"}  # nothing is captured here
    assert set(found[0]["broadcast"]) == {"flagcx"}  # has no routes


def _routes(context: RankContext) -> tuple[str, tuple[str, ...]]:
    communicator = communicator_of_all(context)
    call_everything(communicator)
    communicator.destroy()
    return communicator.backend, communicator.routes


@pytest.mark.parametrize(
    ("routes", "kept", "note"),
    [
        ("all_reduce=native:1KiB|torch", "torch|else flagcx", "native left out: all ranks: there are no methods"),
        ("all_reduce=nccl:1KiB", "else flagcx", "nccl left out: all ranks: the group's torch.distributed backend is"),
    ],
)
def test_a_route_that_cannot_be_used(routes: str, kept: str, note: str, hostcx: Path) -> None:
    """Given a route whose backend is not there, then all ranks leave it out and say why, and calls are right."""
    for backend, words in run_ranks(_routes, 2, env=_environment(hostcx, routes)):
        assert backend == "flagcx"
        assert words[0] == f"all_reduce by size: {kept}"
        assert note in words[1]


def test_a_route_that_one_rank_cannot_use(hostcx: Path, tmp_path: Path) -> None:
    """Given a route whose library one rank lacks, then all ranks leave it out and say which rank it was."""
    environment = _environment(hostcx, "all_reduce=flagcx:1KiB", SGLANG_FL_DIST_BACKEND="torch")
    found = run_ranks(_routes, 2, env=lambda rank: {**environment, "FLAGCX_PATH": str(tmp_path if rank else hostcx)})
    for backend, words in found:
        assert backend == "torch"
        assert words[0] == "all_reduce by size: else torch"
        assert "route flagcx left out: global rank 1: " in words[1]


def _in_groups_of(context: RankContext, sizes: list[int]) -> list[tuple[tuple[str, ...], list[str], list[str]]]:
    """Of this rank's group of each size: its routes in words, what may carry calls, and what carries a small sum."""
    found = []
    for size in sizes:
        for first in range(0, context.world_size, size):
            communicator = group_of(list(range(first, first + size)), context)
            if communicator is not None:
                transport = communicator.agreed.transport
                assert isinstance(transport, SizedTransport)
                before = [recorder.entered() for recorder in transport.recorders()]
                assert torch.equal(communicator.all_reduce(torch.ones(8)), torch.full((8,), float(size)))
                used = zip(transport.recorders(), before, strict=True)
                carried = [recorder.name.split()[-1] for recorder, calls in used if recorder.entered() > calls]
                found.append((communicator.routes, transport.names(), carried))
                dist.barrier(group=communicator.context.cpu_group)
                communicator.destroy()
    return found


@pytest.mark.parametrize(
    ("routes", "of_two", "of_four"),
    [
        (
            "all_reduce=nccl@3ranks|torch:1KiB@2ranks|flagcx@2ranks;all_gather=nccl@5+ranks",
            (("all_reduce by size: torch:1024@2ranks|flagcx@2ranks|else flagcx",), ["flagcx", "torch"], ["torch"]),
            ((), ["flagcx"], ["flagcx"]),
        ),
        (
            "all_reduce=nccl:1KiB@eager@2ranks|torch@3+ranks",
            (("all_reduce by size: else flagcx", NCCL_IS_MISSING), ["flagcx"], ["flagcx"]),
            (("all_reduce by size: torch@3+ranks|else flagcx",), ["flagcx", "torch"], ["torch"]),
        ),
    ],
)
def test_routes_for_groups_of_some_sizes(
    routes: str, of_two: tuple[Any, ...], of_four: tuple[Any, ...], hostcx: Path
) -> None:
    """Given routes for so many ranks, when groups of two and of four are made, then each has those of its size and
    no transport of another, and names no others, not even as left out."""
    environment = _environment(hostcx, routes, SGLANG_FL_DIST_BACKEND="flagcx")
    assert run_ranks(_in_groups_of, 4, [2, 4], env=environment) == [[of_two, of_four]] * 4


def test_strict_mode_does_not_ask_for_routes_of_other_groups(hostcx: Path) -> None:
    """Given strict mode and a route for three ranks that nobody can use, then a group of two is made without it."""
    environment = _environment(hostcx, "all_reduce=nccl@3+ranks|torch", SGLANG_FL_STRICT="1")
    for _, words in run_ranks(_routes, 2, env=environment):
        assert words == ("all_reduce by size: torch|else flagcx",)


def _refused(context: RankContext) -> str:
    with pytest.raises(AgreementError) as raised:
        communicator_of_all(context)
    return str(raised.value)


def test_strict_leaves_no_route_out(hostcx: Path) -> None:
    """Given strict mode and a route that cannot be used, then all ranks raise the same error."""
    texts = run_ranks(_refused, 2, env=_environment(hostcx, "all_reduce=nccl:1KiB", SGLANG_FL_STRICT="1"))
    assert texts[0] == texts[1]
    assert "route nccl left out: all ranks: " in texts[0] and "Strict mode allows no route" in texts[0]


def test_a_route_that_nobody_knows(hostcx: Path) -> None:
    """Given a misspelled backend in a route, then all ranks raise the same error, with a suggestion."""
    texts = run_ranks(_refused, 2, env=_environment(hostcx, "all_reduce=torhc:1KiB"))
    assert texts[0] == texts[1]
    assert "comm.routes names 'torhc', which no rank has; there are flagcx, " in texts[0]
    assert "Did you mean torch?" in texts[0]


@pytest.mark.parametrize("fastest", [0, 1])
def test_ranks_in_different_modes(fastest: int, hostcx: Path) -> None:
    """Given one rank in mode fastest and one in mode all, then both raise the same error, which names the mode."""
    routes = _environment(hostcx, "all_reduce=torch:1KiB")
    plain = {"FLAGCX_PATH": str(hostcx)}
    texts = run_ranks(_refused, 2, env=lambda rank: routes if rank == fastest else plain)
    assert texts[0] == texts[1]
    assert "the ranks differ in comm.mode: " in texts[0] and "fastest" in texts[0]


LACKING = """
from sglang_fl.comm.backends.torch_dist import TorchBackend
from sglang_fl.selection import Kind
import dataclasses, os, torch

class Lacking(TorchBackend):
    def create(self, context):
        transport = super().create(context)
        if context.rank == 1:
            known = transport.capabilities
            transport.capabilities = dataclasses.replace(
                known,
                operations=frozenset(op for op in known.operations if op.value != os.environ.get("LACKS_OPERATION")),
                reducible=frozenset(d for d in known.reducible if str(d) != os.environ.get("LACKS_DTYPE")),
            )
        return transport

def register_comm(registry):
    registry.register(Lacking("lacking", Kind.VENDOR, vendor="chipmaker"))
"""


@pytest.fixture
def lacking(tmp_path: Path) -> Path:
    """An installed distribution whose backend offers less on rank 1 than elsewhere."""
    package, info = tmp_path / "lacking_package", tmp_path / "lacking_package-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(LACKING)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lacking-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang_fl.comm]\nlacking = lacking_package:register_comm\n")
    return tmp_path


def _with_folder(context: RankContext, folder: str) -> tuple[str, tuple[str, ...]]:
    sys.path.insert(0, folder)
    return _routes(context)


@pytest.mark.parametrize("lacks", [{"LACKS_OPERATION": "all_reduce"}, {"LACKS_DTYPE": "torch.float32"}])
@pytest.mark.parametrize("as_route", [True, False])
def test_a_backend_that_offers_less_on_one_rank(
    as_route: bool, lacks: dict[str, str], lacking: Path, hostcx: Path
) -> None:
    """Given a backend, as a route or as the group's, that lacks an operation or a dtype on one rank, then no rank uses
    it for that, nothing hangs, and an idle route is told."""
    environment = _environment(hostcx, "all_reduce=lacking:8KiB", SGLANG_FL_DIST_BACKEND="torch", **lacks)
    if not as_route:
        environment = {"SGLANG_FL_PER_OP": "communicator=vendor:chipmaker", **lacks}
    if not as_route and "LACKS_DTYPE" in lacks:
        with pytest.raises(RanksFailed, match=r"backend lacking has no sum for torch\.float32"):
            run_ranks(_with_folder, 2, str(lacking), env=environment)
        return
    for _, words in run_ranks(_with_folder, 2, str(lacking), env=environment):
        if as_route and "LACKS_OPERATION" in lacks:
            assert "route lacking of all_reduce left out: not every rank's lacking offers it" in words[1]


def test_ranks_with_different_routes(hostcx: Path) -> None:
    """Given ranks whose routes differ, then all raise the same error, which shows both."""

    def environment(rank: int) -> dict[str, Any]:
        return _environment(hostcx, f"all_reduce=torch:{rank + 1}KiB")

    texts = run_ranks(_refused, 2, env=environment)
    assert texts[0] == texts[1]
    assert (
        "differ in comm.routes: global rank 0 has all_reduce=torch:1024; global rank 1 has all_reduce=torch:2048"
        in (texts[0])
    )


def test_a_vendor_rule_holds_for_routes(hostcx: Path) -> None:
    """Given a denied vendor, then its route is left out for that reason."""
    environment = _environment(hostcx, "all_reduce=nccl:1KiB", SGLANG_FL_DENY_VENDORS="cuda")
    for _, words in run_ranks(_routes, 2, env=environment):
        assert "route nccl left out: all ranks: vendor nvidia is denied" in words[1]
