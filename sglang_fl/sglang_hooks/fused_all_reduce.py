"""Names FlashInfer's fused all-reduce: SGLang reduces with it past its groups' methods, and so past every route."""

from __future__ import annotations

import logging
from typing import Any

from sglang_fl.config import CommMode
from sglang_fl.sglang_hooks.registration import Hook, HookKind

logger = logging.getLogger("sglang_fl.comm")

# The first place where SGLang knows whether FlashInfer could make its memory; every model runner on a GPU comes by.
READY = "sglang.srt.model_executor.model_runner.ModelRunner._pre_initialize_flashinfer_allreduce_workspace"
OFF_SWITCH = "--enforce-disable-flashinfer-allreduce-fusion"


def hooks(mode: CommMode) -> list[Hook]:
    """A hook that reports the fused all-reduce once it is ready; nothing lies on a path that serves requests."""

    def after_workspaces(result: Any, self: Any) -> None:
        report(mode)

    return [Hook(READY, after_workspaces, HookKind.AFTER)]


def report(mode: CommMode) -> None:
    """Log where SGLang's all-reduces go if its fusion is switched on, in the words of ``mode``.

    In mode all it is a warning: calls of a group do not go through the selected backend.
    """
    from sglang.srt.layers import communicator
    from sglang.srt.server_args import get_global_server_args

    groups = reducing_groups()
    if not groups or not get_global_server_args().enable_flashinfer_allreduce_fusion:
        return
    subject = f"FlashInfer's fused all-reduce for {' and '.join(groups)}"
    # SGLang's own question before each call, asked for one token.
    if not communicator.apply_flashinfer_allreduce_fusion(1):
        logger.info(
            "[sglang_fl] %s: switched on, but SGLang cannot use it here; these all-reduces go through the groups",
            subject,
        )
        return
    most = communicator.FUSE_ALLREDUCE_MAX_BATCH_SIZE
    level, consequence = (
        (logging.WARNING, f"{OFF_SWITCH} sends them through the groups")
        if mode is CommMode.ALL
        else (logging.INFO, f"a route of SGLang's own beside comm.routes, which {OFF_SWITCH} closes")
    )
    logger.log(
        level,
        "[sglang_fl] %s: on, so that the all-reduce before a norm, of up to %d tokens, goes neither through SGLang's "
        "group nor through ours, and is neither recorded nor watched (mode %s): %s",
        subject,
        most,
        mode.value,
        consequence,
    )


def reducing_groups() -> list[str]:
    """Names of the groups of several ranks whose all-reduces SGLang may fuse, as its RMSNorm picks them."""
    from sglang.srt.distributed import parallel_state

    experts = parallel_state.get_moe_ep_group()
    if experts.world_size == 1:
        experts = parallel_state.get_moe_tp_group()
    found = (parallel_state.get_attn_tp_group(), experts)
    return list(dict.fromkeys(group.unique_name for group in found if group.world_size > 1))
