"""Ranks of a group must agree on NCCL's order between graphs and other calls: one error on all where they do not.

The CPU stands for a GPU: what belongs to NCCL is given to its device type as well.
"""

from __future__ import annotations

import ctypes
import io
import os
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_fl.comm import graph_mixing
from sglang_fl.comm.backends.flagcx.transport import FlagCXTransport
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.errors import AgreementError, CommError
from sglang_fl.comm.graph_mixing import LIBRARIES, prepare
from sglang_fl.comm.sizes import registered_memory
from sglang_fl.comm.tools.launch import launched
from sglang_fl.config import load_settings
from sglang_fl.testing.ranks import RankContext, run_ranks
from tests.distributed.groups import call_everything, communicator_of_all

VARIABLE = LIBRARIES["cuda"].variable


def _group(context: RankContext, hosts: tuple[int | None, ...] = (), names: tuple[str, ...] = ()) -> CommunicatorFL:
    """A group of all ranks, each of which takes the deployment for one of so many hosts, and its own for ``names``."""
    LIBRARIES["cpu"] = LIBRARIES["cuda"]
    if names:
        process = replace(graph_mixing.this_process(), host=names[context.rank])
        graph_mixing.this_process = lambda: process
    if hosts:
        prepare(load_settings(), "cpu", hosts[context.rank])
    return communicator_of_all(context)


def _used(context: RankContext, hosts: tuple[int | None, ...]) -> None:
    communicator = _group(context, hosts)
    call_everything(communicator)
    communicator.destroy()


def _refused(context: RankContext, hosts: tuple[int | None, ...] = (), names: tuple[str, ...] = ()) -> str:
    with pytest.raises(AgreementError) as raised:
        _group(context, hosts, names)
    return str(raised.value)


@pytest.mark.parametrize("hosts", [(1, 1), (2, 2), (None, None)])
def test_ranks_that_decide_alike_make_their_group(hosts: tuple[int | None, ...]) -> None:
    """Given ranks that know of as many hosts each, then their group is made and used."""
    run_ranks(_used, 2, hosts, env={VARIABLE: None})


def test_different_values_are_one_error() -> None:
    """Given one rank with the variable, when the ranks agree, then all raise the same error with both values."""
    texts = run_ranks(_refused, 2, env=lambda rank: {VARIABLE: "0" if rank else None})
    assert texts == [texts[0]] * 2
    assert (
        f"group tp:0: the ranks differ in {VARIABLE}: global rank 0 has no value; global rank 1 has 0. Give every node "
        "the same settings" in texts[0]
    )


def test_different_decisions_are_one_error() -> None:
    """Given a rank that knows of two hosts and one of one, then all raise the same error: only one has set 0."""
    texts = run_ranks(_refused, 2, (2, 1), env={VARIABLE: None})
    assert texts == [texts[0]] * 2
    assert f"the ranks differ in {VARIABLE}: global rank 0 has no value; global rank 1 has 0" in texts[0]


def test_a_group_across_hosts_is_one_error() -> None:
    """Given ranks that all take the deployment for one host, when they are on two, then all raise an error that names
    the variable, both hosts and what to do."""
    texts = run_ranks(_refused, 2, (1, 1), ("left", "right"), env={VARIABLE: None})
    assert texts == [texts[0]] * 2
    for part in (f"must be one with {VARIABLE}=0", "SGLANG_FL_COMM_GRAPH_MIXING=keep", "0 has left (", "1 has right ("):
        assert part in texts[0]


def test_what_the_user_set_may_span_hosts() -> None:
    """Given the user's own 0, when the ranks are on two hosts, then nothing is said: the user's value wins."""
    run_ranks(_made_across_hosts, 2, env={VARIABLE: "0"})


def _made_across_hosts(context: RankContext) -> None:
    _group(context, (1, 1), ("left", "right")).destroy()


def _windows(context: RankContext, version: tuple[int, int, int]) -> tuple[int, str, str]:
    """Windows that FlagCX got, why it adopts no block of another's, and the error where it is asked for its own."""
    graph_mixing.nccl_version = lambda: version
    communicator = _group(context)
    transport = communicator.agreed.transport
    assert isinstance(transport, FlagCXTransport)
    block, error = torch.zeros(4096, dtype=torch.uint8), ""
    reason = transport.registrar.adopt(block.data_ptr(), 4096)
    try:
        registered_memory(communicator).empty(8, dtype=torch.float32)
    except CommError as found:
        error = str(found)
    library = ctypes.CDLL(transport.communicator.library.path)
    library.hostcxCallCountOf.restype = ctypes.c_uint64
    calls = int(library.hostcxCallCountOf(b"flagcxCommWindowRegister"))
    communicator.destroy()
    return calls, reason, error


def test_flagcx_gets_no_windows_where_nccls_kernels_would_not_wait(hostcx: Path) -> None:
    """Given NCCL 2.28.9 and 0, then FlagCX takes memory as ordinary memory, with the reason, and makes none of its
    own; given 2.30.7, then both become windows."""
    environment = {VARIABLE: "0", "FLAGCX_PATH": str(hostcx)}
    for calls, reason, error in run_ranks(_windows, 2, (2, 28, 9), env=environment):
        assert calls == 0
        assert reason.startswith("NCCL 2.28.9's kernels for registered memory do not wait")
        assert f"flagcx makes no registered memory, since {reason}. Choose" in error
    assert run_ranks(_windows, 2, (2, 30, 7), env=environment) == [(2, "", "")] * 2


def _in_a_tool(_: RankContext) -> tuple[str | None, str]:
    """The variable inside of a tool's launch, and what that said."""
    LIBRARIES["cpu"] = LIBRARIES["cuda"]
    output = io.StringIO()
    with redirect_stdout(output), launched("cpu", 30.0):
        return os.environ.get(VARIABLE), output.getvalue()


def test_the_tools_decide_as_a_server_does() -> None:
    """Given the self-test's and the benchmark's way to start, on one host, then 0 is set before groups, and told."""
    alone = dict.fromkeys(("RANK", "WORLD_SIZE", VARIABLE))
    ((value, said),) = run_ranks(_in_a_tool, 1, env=alone, gloo=False)
    assert value == "0"
    assert said.startswith(f"# {VARIABLE}=0 and NCCL_NET_DISABLE_INTRA=1 set: comm.graph_mixing is auto")
