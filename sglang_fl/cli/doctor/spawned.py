"""The hooks in a process that is spawned as SGLang spawns its schedulers, with everything imported that they import."""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from multiprocessing.connection import Connection

from sglang_fl.cli.doctor.children import Failure, Part
from sglang_fl.cli.doctor.plugin_in_sglang import SPAWNED, hooks_here, sglang_absence
from sglang_fl.cli.doctor.report import Finding, Hooks, Report

_SCHEDULER = "sglang.srt.managers.scheduler"


def parts() -> list[Part]:
    """One part, a :class:`Report`."""
    return [("the plugin in a spawned process like SGLang's schedulers", spawn)]


def spawn() -> Report | Failure:
    """What the spawned process found out; its end without a word is a failure, too."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_in_spawned, args=(sender,))
    process.start()
    sender.close()
    try:
        found: Report = receiver.recv()
    except EOFError:
        process.join()
        return Failure(f"the spawned process ended with code {process.exitcode}")
    process.join()
    return found


def _in_spawned(sender: Connection) -> None:
    sender.send(_look())
    sender.close()


def _look() -> Report:
    absence = sglang_absence()
    if absence is not None:
        return Report(problems=[absence], hooks=[Hooks(SPAWNED, 0, 0, reason=absence.found)])
    try:
        importlib.import_module(_SCHEDULER)
    except Exception as error:  # noqa: BLE001 - third-party code; the reason is reported
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"SGLang's scheduler cannot be imported: {type(error).__name__}: {error} ({where.filename})"
        action = "Install what is missing; where there is no sgl_kernel, the README's stand-in takes its place."
        return Report(problems=[Finding("SGLang", text, action)], hooks=[Hooks(SPAWNED, 0, 0, reason=text)])
    return hooks_here(SPAWNED)
