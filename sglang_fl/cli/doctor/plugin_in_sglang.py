"""The plugin inside SGLang: loads it as SGLang's command does, in a child process, and says what of it is live."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_fl.cli.doctor import shadowing
from sglang_fl.cli.doctor.children import Part
from sglang_fl.cli.doctor.report import Fact, Finding, Hooks, Layer, Report

if TYPE_CHECKING:
    from sglang_fl.plugin import Plugin

MAIN, SPAWNED = "main", "spawned"
_GROUP = "sglang.srt.plugins"
_ACTION = "SGLang's log has the cause ('Failed to apply hooks'). SGLANG_PLUGINS=sglang_fl loads no other plugin."


def parts() -> list[Part]:
    """One part, a :class:`Report`."""
    return [("the plugin in a process like SGLang's command", main)]


def main() -> Report:
    """Whether SGLang is there, takes the plugin, and calls its hooks; the layers in the plugin's own words."""
    absence = sglang_absence()
    if absence is not None:
        return Report(problems=[absence], hooks=[Hooks(MAIN, 0, 0, reason=absence.found)])
    with warnings_kept() as said:
        report = hooks_here(MAIN)
        plugin = this_plugin()
        if plugin is None:
            return report
        plugin.report()
    report.device.append(Fact("SGLang's platform", plugin.platform_line().partition(": ")[2]))
    report.layers = [Layer(state.name, state.is_on, state.reason) for state in plugin.layers]
    report.warnings += [Finding("settings", text.removeprefix("[sglang_fl] "), "") for text in said]
    report.problems += _layer_off(plugin)
    return report


def sglang_absence() -> Finding | None:
    """Why SGLang cannot be used in this process; None if it can."""
    if importlib.util.find_spec("sglang") is None:
        text = "SGLang is not installed, so nothing loads this plugin; the rest was looked at without it"
        return Finding("SGLang", text, "Install it: pip install sglang==0.5.11, or its empty install (README).")
    try:
        importlib.import_module("sglang.srt.plugins")
    except Exception as error:  # noqa: BLE001 - third-party code; the reason is reported
        text = f"SGLang {_version('sglang')} is installed and cannot be imported: {type(error).__name__}: {error}"
        return Finding("SGLang", text, "Install what is missing, or SGLang 0.5.11 anew.")
    return None


def hooks_here(process: str) -> Report:
    """Load plugins in this process and look at each hook. SGLang can be imported.

    Raises:
        SystemExit: the plugin refuses to be loaded; the text says why.
    """
    from sglang.srt.plugins import load_plugins

    from sglang_fl.sglang_hooks.registration import count_applied, dead, foreign

    load_plugins()
    plugin = this_plugin()
    if plugin is None:
        return _not_loaded(process)
    report = shadowing.of_loaded(Path.cwd(), sys.path)
    assert plugin.groups is not None
    hooks = plugin.groups.hooks
    found = Hooks(process, count_applied(hooks), len(hooks), tuple(dead(hooks)), tuple(foreign(hooks)))
    report.hooks.append(found)
    if found.dead:
        text = f"hooks are not live in the {process} process: {'; '.join(found.dead)}"
        report.problems.append(Finding("hooks", text, _ACTION))
    report.warnings += [Finding("hooks", f"another plugin's hook: {text}", _ACTION) for text in found.foreign]
    return report


def this_plugin() -> Plugin | None:
    """The plugin of this process with its hooks; None where SGLang has not loaded it."""
    from sglang_fl import plugin

    found = plugin._plugin
    return None if found is None or found.groups is None else found


def _not_loaded(process: str) -> Report:
    chosen = os.environ.get("SGLANG_PLUGINS", "").strip()
    if chosen and "sglang_fl" not in [name.strip() for name in chosen.split(",")]:
        reason = f"SGLANG_PLUGINS={chosen} leaves the plugin out, so SGLang runs without it"
        finding = Finding("hooks", reason, "Unset it, or add sglang_fl to it.")
        return Report(warnings=[finding], hooks=[Hooks(process, 0, 0, reason=reason)])
    reason = "SGLang has not loaded the plugin"
    if not [point for point in entry_points(group=_GROUP) if point.name == "sglang_fl"]:
        reason += f": no installed distribution has an entry point sglang_fl in {_GROUP}"
    finding = Finding("hooks", reason, "Install the package, pip install ., instead of using it from a folder.")
    return Report(problems=[finding], hooks=[Hooks(process, 0, 0, reason=reason)])


def _layer_off(plugin: Plugin) -> list[Finding]:
    """A problem where layer 1 was asked for and is off."""
    from sglang_fl.aten.layer import is_asked_for
    from sglang_fl.plugin import ATEN_LAYER

    state = next(layer for layer in plugin.layers if layer.name == ATEN_LAYER)
    if state.is_on or not is_asked_for(plugin.settings):
        return []
    fields = ("aten.enabled", "aten.profile", "aten.whitelist", "aten.verified")
    rows = [row for row in plugin.settings.rows() if row.field in fields and row.source.where != "default"]
    asking = ", ".join(f"{row.source.where} ({row.field} = {row.value})" for row in rows)
    text = f"{ATEN_LAYER}, is asked for by {asking}, and is off: {state.reason}"
    return [Finding("layers", text, "Mend what the reason names, or unset what asks for it.")]


@contextmanager
def warnings_kept() -> Iterator[list[str]]:
    """The warnings of our loggers while inside."""
    kept: list[str] = []

    class Keeper(logging.Handler):
        """Keeps each record's text."""

        def emit(self, record: logging.LogRecord) -> None:
            """See :meth:`logging.Handler.emit`."""
            kept.append(record.getMessage())

    handler, logger = Keeper(logging.WARNING), logging.getLogger("sglang_fl")
    logger.addHandler(handler)
    try:
        yield kept
    finally:
        logger.removeHandler(handler)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"
