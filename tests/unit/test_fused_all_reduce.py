"""FlashInfer's fused all-reduce: named in both modes where SGLang uses it, and nowhere else.

SGLang's own question whether it fuses is asked, of its real module; the GPU, FlashInfer and the ranks that it looks at
are stand-ins, since this machine has none.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_fl.config import CommMode
from sglang_fl.sglang_hooks import fused_all_reduce
from sglang_fl.sglang_hooks.registration import misfits

Records = list[logging.LogRecord]


def group(name: str, size: int) -> Any:
    """One of SGLang's groups, as far as it is asked."""
    return SimpleNamespace(unique_name=name, world_size=size)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server of two ranks on a Hopper GPU with FlashInfer, on which SGLang has switched the fusion on."""
    from sglang.srt import server_args
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import communicator

    made = SimpleNamespace(enable_flashinfer_allreduce_fusion=True)
    monkeypatch.setattr(server_args, "_global_server_args", made)
    monkeypatch.setattr(communicator, "_is_sm90_supported", True)
    monkeypatch.setattr(communicator, "_is_flashinfer_available", True)
    monkeypatch.setattr(communicator, "is_flashinfer_allreduce_unavailable", lambda: False)
    for name, value in (("_ATTN_TP", group("attention_tp:0", 2)), ("_MOE_TP", group("moe_tp:0", 2))):
        monkeypatch.setattr(parallel_state, name, value)
    monkeypatch.setattr(parallel_state, "_MOE_EP", group("moe_ep:0", 1))
    return made


def reported(mode: CommMode, caplog: pytest.LogCaptureFixture) -> Records:
    """What the hook logs when SGLang's method has returned."""
    (hook,) = fused_all_reduce.hooks(mode)
    with caplog.at_level(logging.INFO, logger="sglang_fl.comm"):
        assert hook.function(None, object()) is None
    return caplog.records


def test_the_hook_fits_the_installed_sglang() -> None:
    """Given the installed SGLang, when the hook is compared with what it wraps, then it fits."""
    assert misfits(fused_all_reduce.hooks(CommMode.ALL)) == []


@pytest.mark.parametrize(
    ("mode", "level", "consequence"),
    [
        (CommMode.ALL, logging.WARNING, "(mode all): --enforce-disable-flashinfer-allreduce-fusion sends them"),
        (CommMode.FASTEST, logging.INFO, "(mode fastest): a route of SGLang's own beside comm.routes, which --enforce"),
    ],
)
def test_it_is_named_in_both_modes(
    arguments: Any, caplog: pytest.LogCaptureFixture, mode: CommMode, level: int, consequence: str
) -> None:
    """Given SGLang's fusion in use, when the groups are ready, then groups, tokens and the way out are named."""
    (record,) = reported(mode, caplog)
    message = record.getMessage()
    assert record.levelno == level
    assert "all-reduce for attention_tp:0 and moe_tp:0: on, so that" in message
    assert "of up to 2048 tokens" in message and consequence in message


def test_experts_that_are_spread_are_named_instead_of_split_ones(
    arguments: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given expert parallelism, when reported, then its group is named, as SGLang reduces over it."""
    from sglang.srt.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "_MOE_EP", group("moe_ep:0", 2))
    monkeypatch.setattr(parallel_state, "_MOE_TP", group("moe_tp:0", 1))
    (record,) = reported(CommMode.ALL, caplog)
    assert "for attention_tp:0 and moe_ep:0: on" in record.getMessage()


def test_memory_that_flashinfer_could_not_make_is_told(
    arguments: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the fusion switched on and FlashInfer unable, when reported, then the groups are said to carry it."""
    from sglang.srt.layers import communicator

    monkeypatch.setattr(communicator, "is_flashinfer_allreduce_unavailable", lambda: True)
    (record,) = reported(CommMode.ALL, caplog)
    assert record.levelno == logging.INFO
    assert record.getMessage().endswith("these all-reduces go through the groups")


@pytest.mark.parametrize("case", ["off", "one rank"])
def test_nothing_is_said_where_nothing_is_fused(
    arguments: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Given the fusion off, or one rank, when reported, then there is no line."""
    from sglang.srt.distributed import parallel_state

    if case == "off":
        arguments.enable_flashinfer_allreduce_fusion = False
    else:
        for name in ("_ATTN_TP", "_MOE_TP"):
            monkeypatch.setattr(parallel_state, name, group(name, 1))
    assert reported(CommMode.ALL, caplog) == []
