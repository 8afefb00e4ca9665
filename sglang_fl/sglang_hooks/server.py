"""Hooks on SGLang's start: the attention backend from the environment, reports after logging is set up."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_fl.sglang_hooks.registration import Hook, HookKind

POST_INIT = "sglang.srt.server_args.ServerArgs.__post_init__"
LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
CONFIGURE_LOGGER = "sglang.srt.utils.common.configure_logger"


def attention_backend_hook(attention_backend: str) -> Hook:
    """Sets SGLang's attention backend where the flag is absent."""

    def set_attention_backend(self: Any) -> None:
        if self.attention_backend is None:
            self.attention_backend = attention_backend

    return Hook(POST_INIT, set_attention_backend, HookKind.BEFORE)


def report_hook(report: Callable[[], None]) -> Hook:
    """Calls ``report`` whenever SGLang has configured logging, which it does after it loads plugins."""

    def report_after_logging(result: Any, server_args: Any, prefix: str = "") -> None:
        report()

    return Hook(CONFIGURE_LOGGER, report_after_logging, HookKind.AFTER)


def raise_hooks(error: Exception) -> list[Hook]:
    """Make ``sglang.Engine(...)`` raise ``error``: SGLang swallows what a plugin's load function raises."""

    def raise_error(*_: Any, **__: Any) -> None:
        raise error

    return [Hook(target, raise_error, HookKind.BEFORE) for target in (POST_INIT, LAUNCH)]


def is_command_or_child() -> bool:
    """Whether this process is one of SGLang's commands or was started by one, as opposed to a user's own program."""
    if multiprocessing.parent_process() is not None:
        # A user's program may make its engine in a child of its own; SGLang's children run a function of SGLang.
        target = getattr(multiprocessing.current_process(), "_target", None)
        return str(getattr(target, "__module__", "")).split(".")[0] == "sglang"
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    module = spec.name if spec is not None else ""
    return module.split(".")[0] == "sglang" or Path(sys.argv[0]).name == "sglang"
