"""What SGLang's entry points reach: the settings, the three layers switched on, the platform, the first report."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform as python_platform
import traceback
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import parent_process
from typing import TYPE_CHECKING

from sglang_fl import __version__
from sglang_fl.config import (
    CHIPS,
    CommBackend,
    CommMode,
    Problem,
    SettingRow,
    Settings,
    SettingsError,
    SourceKind,
    closest,
    find_chip,
    load_settings,
)
from sglang_fl.devices import detect_platform, is_present
from sglang_fl.sglang_hooks.registration import Hook

if TYPE_CHECKING:
    from sglang_fl.sglang_hooks.groups import Groups
    from sglang_fl.sglang_hooks.operators import OperatorLayer

logger = logging.getLogger("sglang_fl")

PLATFORM_CLASS = "sglang_fl.platform:PlatformFL"
PLATFORM_NAME = "sglang_fl"
STANDIN_PACKAGE = "sglang_fl_kernel_standin"
PACKAGES = ("sglang", "torch", "triton", "flag_gems")


@dataclass(frozen=True)
class LayerState:
    """One layer, on or off, and why."""

    name: str
    is_on: bool
    reason: str

    def line(self) -> str:
        """One line for the report."""
        return f"{self.name}: {'on' if self.is_on else 'off'}: {self.reason}"


@dataclass
class Plugin:
    """What the plugin is in this process; one object, made by the first entry point that SGLang calls."""

    settings: Settings
    platform: str | None
    layers: list[LayerState] = field(default_factory=list)
    groups: Groups | None = None
    notices: list[str] = field(default_factory=list)
    reported: bool = False

    def report(self) -> None:
        """Log the first report, once, as soon as SGLang has configured logging."""
        if self.reported:
            return
        self.reported = True
        logger.setLevel(self.settings.system.log_level.value)
        for line in self.report_lines():
            logger.info("[sglang_fl] %s", line)
        for warning in (*self.settings.warnings, *unknown_vendors(self.settings), *_idle_routes(self.settings)):
            logger.warning("[sglang_fl] %s", warning)
        for warning in _unknown_operators(self.settings):
            logger.warning("[sglang_fl] %s", warning)

    def notice(self, line: str) -> None:
        """Add a line to the report, or log it where the report has been made."""
        self.notices.append(line)
        if self.reported:
            logger.info("[sglang_fl] %s", line)

    def report_lines(self) -> list[str]:
        """The settings that are not defaults with their sources, and each layer with its reason."""
        versions = ", ".join(f"{name} {number}" for name, number in installed_versions().items())
        lines = [f"{__version__}, Python {python_platform.python_version()}, {versions}; {self.platform_line()}"]
        lines += [layer.line() for layer in self.layers] + self.notices
        return lines + [self._setting_line(row) for row in self.settings.rows() if row.source.where != "default"]

    def _setting_line(self, row: SettingRow) -> str:
        section = row.field.partition(".")[0]
        layer = LAYER_OF_SECTION.get(section)
        off = [state for state in self.layers if state.name == layer and not state.is_on]
        idle = f"; no effect, {layer} is off" if off and row.field not in ALSO_FOR_COMMUNICATION else ""
        return f"setting {row.field} = {row.value} (from {row.source.where}){idle}"

    def platform_line(self) -> str:
        """Which platform was found and whether SGLang runs on ours or on its own."""
        if self.platform is None:
            return "platform: an accelerator that this version does not know; SGLang's own detection is used"
        owner, reason = ("PlatformFL", "") if is_platform_needed(self.platform) else ("SGLang's own", NATIVE_REASON)
        return f"platform {self.platform}: {owner}{reason}"


ATEN_LAYER, OPS_LAYER, COMM_LAYER = "layer 1, ATen operators", "layer 2, fused operators", "layer 3, communication"
LAYER_OF_SECTION = {"aten": ATEN_LAYER, "ops": OPS_LAYER}
# Settings of the operators that govern communication as well.
ALSO_FOR_COMMUNICATION = {"ops.prefer", "ops.backends", "ops.strict", "ops.deny_vendors", "ops.allow_vendors"}
NATIVE_REASON = " (NVIDIA with sgl_kernel needs none of ours)"
_plugin: Plugin | None = None
_loaded = False


def load_plugin() -> None:
    """Switch the layers on in this process. Idempotent; called by SGLang in every process that loads plugins.

    Raises:
        SystemExit: the configuration is wrong, in a process of SGLang's own; SGLang would swallow an error
            and serve without the plugin. In a user's program ``sglang.Engine(...)`` raises the error instead.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True
    from sglang_fl.sglang_hooks import server

    try:
        plugin = _this_plugin()
        _switch_on(plugin)
    except Exception as error:
        refusal = _refusal(error)
        if server.is_command_or_child():
            raise SystemExit(str(refusal)) from error
        from sglang_fl.sglang_hooks.registration import register

        register(server.raise_hooks(refusal))
        logger.debug("[sglang_fl] not loaded", exc_info=error)


def activate_platform() -> str | None:
    """The platform class for SGLang, or None where SGLang's own platform is the right one.

    Raises:
        SystemExit: the configuration is wrong, in a process of SGLang's own; elsewhere ``load_plugin`` tells.
    """
    from sglang_fl.sglang_hooks import server

    try:
        platform = _this_plugin().platform
    except Exception as error:
        if server.is_command_or_child():
            raise SystemExit(str(_refusal(error))) from error
        logger.debug("[sglang_fl] the settings are wrong; load_plugin tells", exc_info=error)
        platform = detect_platform()
    return PLATFORM_CLASS if platform is not None and is_platform_needed(platform) else None


def active_platform() -> str:
    """The name of the platform whose data :class:`sglang_fl.platform.PlatformFL` answers with."""
    platform = _plugin.platform if _plugin is not None else detect_platform()
    if platform is None:
        raise ConfigurationError("sglang_fl: no platform of sglang_fl fits this machine; set SGLANG_FL_PLATFORM")
    return platform


def require_live() -> None:
    """Check that the plugin's hooks are live, from a place that SGLang reaches without a hook.

    Raises:
        HookError: names each hook that is not.
    """
    if not _loaded:
        logger.warning(
            "[sglang_fl] SGLang uses the platform %s without the plugin, which SGLANG_PLUGINS=%s leaves out: layers 1, "
            "2 and 3 are off. Unset SGLANG_PLUGINS, or SGLANG_PLATFORM too",
            PLATFORM_NAME,
            os.environ.get("SGLANG_PLUGINS", ""),
        )
        return
    if _plugin is not None and _plugin.groups is not None:
        _plugin.groups.require_live()


class ConfigurationError(ValueError):
    """The plugin cannot do what the settings, or this SGLang, ask of it."""


def _refusal(error: Exception) -> ConfigurationError:
    """The error to end with: SGLang would log anything else and serve on without the plugin."""
    if isinstance(error, ConfigurationError):
        return error
    where = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigurationError(
        f"sglang_fl {__version__} could not be loaded: {type(error).__name__}: {error} "
        f"({where.filename}:{where.lineno}). SGLANG_PLUGINS=__none__ serves without it."
    )


def is_platform_needed(platform: str) -> bool:
    """False where SGLang alone serves best: on NVIDIA with a real sgl_kernel, unless it was asked for."""
    from sglang.srt.environ import envs

    if platform != "cuda" or envs.SGLANG_PLATFORM.get() == PLATFORM_NAME:
        return True
    return not has_real_sgl_kernel()


def has_real_sgl_kernel() -> bool:
    """Whether the vendor's sgl_kernel is installed, as opposed to none or the stand-in.

    Not imported for that: it costs seconds, and fails where there is no driver.
    """
    spec = importlib.util.find_spec("sgl_kernel")
    return spec is not None and not type(spec.loader).__module__.startswith(STANDIN_PACKAGE)


def has_own_kernels(platform: str | None) -> bool:
    """Whether SGLang's own operators have the vendor's kernels on ``platform``, which is in use."""
    # Ascend's are in torch_npu, without which the platform would not have been detected.
    return platform == "ascend" or (platform in ("cuda", "musa") and has_real_sgl_kernel())


def installed_versions() -> dict[str, str]:
    """Version of each package that matters, for those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _this_plugin() -> Plugin:
    global _plugin
    if _plugin is None:
        detected = detect_platform()
        try:
            settings = load_settings(platform=detected)
        except SettingsError as error:
            raise ConfigurationError(str(error)) from error
        platform = settings.system.platform
        if platform is not None and platform != detected and not is_present(platform):
            raise ConfigurationError(
                f"sglang_fl: {settings.source('system.platform').where} asks for the platform {platform}, but torch "
                f"finds no such device here; detected: {detected}. Unset it, or install the device's torch."
            )
        from sglang_fl.platform import PLATFORMS

        _plugin = Plugin(settings, platform if platform in PLATFORMS else None)
    return _plugin


def _switch_on(plugin: Plugin) -> None:
    from sglang_fl.sglang_hooks import server
    from sglang_fl.sglang_hooks.registration import misfits, register

    check_files(plugin.settings)
    hooks: list[Hook] = [server.report_hook(plugin.report)]
    hooks += _aten_hooks(plugin)
    operators = _operator_layer(plugin)
    hooks += operators.hooks
    backend = plugin.settings.system.attention_backend
    if backend is not None:
        _check_attention_backend(plugin.settings, backend)
        hooks.append(server.attention_backend_hook(backend))
    hooks += _communication_hooks(plugin)
    if plugin.platform == "cuda" and not has_real_sgl_kernel():
        # SGLang refuses to start an NVIDIA server without the distribution; the empty install has none.
        os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    problems = [*misfits(hooks), *operators.misfits]
    if problems:
        raise ConfigurationError(
            f"sglang_fl: the installed SGLang {installed_versions().get('sglang', '')} does not fit: "
            f"{'; '.join(problems)}. sglang_fl {__version__} supports SGLang 0.5.11. "
            "SGLANG_PLUGINS=__none__ serves without it."
        )
    register(hooks)
    assert plugin.groups is not None
    plugin.groups.hooks = hooks
    plugin.groups.operator_choices = operators.choices


def _check_attention_backend(settings: Settings, backend: str) -> None:
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    if backend in ATTENTION_BACKEND_CHOICES:
        return
    suggestion = closest(backend, ATTENTION_BACKEND_CHOICES)
    raise _wrong(
        settings,
        "system.attention_backend",
        f"one of {', '.join(ATTENTION_BACKEND_CHOICES)}",
        "Correct the variable or unset it.",
        suggestion and repr(suggestion),
    )


def check_files(settings: Settings) -> None:
    """The files that are written later must be possible now, while a message still reaches the user.

    Not the record of layer 1: where it cannot be written that layer warns, and serves without it.

    Raises:
        ConfigurationError: one of them is not; names the setting.
    """
    for field_name in ("comm.audit", "ops.dispatch_log"):
        path = settings.value(field_name)
        if path is None or (not path.is_dir() and os.access(path.absolute().parent, os.W_OK | os.X_OK)):
            continue
        allowed = "a file, in a folder that exists and can be written"
        raise _wrong(settings, field_name, allowed, "Make the folder or name another file.")
    _check_dump_folder(settings)


def _check_dump_folder(settings: Settings) -> None:
    from sglang_fl.comm.dumps import DumpError, check_folder

    folder = settings.comm.dump_dir
    if folder is None:
        return
    try:
        check_folder(folder)
    except DumpError as error:
        allowed = "a folder of this user, no link, that others cannot write into, or one that can be made"
        raise _wrong(settings, "comm.dump_dir", allowed, f"Name another one: {error}") from error


def _wrong(
    settings: Settings, field_name: str, allowed: str, action: str, suggestion: str | None = None
) -> ConfigurationError:
    where, found = settings.source(field_name).where, repr(settings.text(field_name))
    return ConfigurationError(str(SettingsError([Problem(where, field_name, found, allowed, action, suggestion)])))


def unknown_vendors(settings: Settings) -> list[str]:
    """A line for each vendor of the lists that nobody knows."""
    from sglang_fl.comm.discovery import discover_backends
    from sglang_fl.dispatch import get_manager

    known = [name for chip in CHIPS for name in chip.names]
    known += [backend.vendor for backend in discover_backends().backends.values() if backend.vendor]
    known += get_manager().vendors()
    fields = ("ops.deny_vendors", "ops.allow_vendors")
    return [f"no such vendor is known: {problem}" for name in fields for problem in settings.unknown_names(name, known)]


def _mode(settings: Settings) -> str:
    if settings.comm.mode is CommMode.ALL:
        return "mode all"
    if not settings.comm.routes:
        return "mode fastest, for which comm.routes has no route here: as mode all"
    return f"mode fastest, routes {settings.text('comm.routes')} (from {settings.source('comm.routes').where})"


def _idle_routes(settings: Settings) -> list[str]:
    source = settings.source("comm.routes")
    if settings.comm.mode is CommMode.FASTEST or source.kind not in (SourceKind.ENVIRONMENT, SourceKind.YAML):
        return []
    return [f"comm.routes (from {source.where}) has no effect: the mode is all. SGLANG_FL_COMM_MODE=fastest uses it."]


def _unknown_operators(settings: Settings) -> list[str]:
    from sglang_fl.sglang_hooks.operators import unknown_names

    return unknown_names(settings)


def _aten_hooks(plugin: Plugin) -> list[Hook]:
    from sglang_fl.aten.layer import AtenError, Outcome, before_import
    from sglang_fl.sglang_hooks import aten

    try:
        expected = before_import(plugin.settings, plugin.platform)
    except AtenError as error:
        raise ConfigurationError(str(error)) from error
    plugin.layers.append(LayerState(ATEN_LAYER, expected.is_on, expected.reason))

    def report(outcome: Outcome) -> None:
        plugin.notice(LayerState(ATEN_LAYER, outcome.is_on, outcome.reason).line())
        for warning in outcome.warnings:
            logger.warning("[sglang_fl] %s: %s", ATEN_LAYER, warning)

    return aten.hooks(plugin.settings, report) if expected.is_on else []


def _operator_layer(plugin: Plugin) -> OperatorLayer:
    from sglang_fl.selection import SelectionError
    from sglang_fl.sglang_hooks import operators, server

    def refuse(message: str) -> BaseException:
        # SGLang reads its arguments in the command itself, where a traceback would only hide the message.
        return SystemExit(message) if server.is_command_or_child() else ConfigurationError(message)

    try:
        layer = operators.operator_layer(
            plugin.settings, plugin.platform, has_own_kernels(plugin.platform), plugin.notice, refuse
        )
    except SelectionError as error:
        raise ConfigurationError(
            f"sglang_fl: {plugin.settings.source('ops.strict').where} is set: {error}\nSGLANG_FL_STRICT=0 lets "
            "the next one be used."
        ) from error
    plugin.layers.append(LayerState(OPS_LAYER, layer.is_on, layer.reason))
    plugin.notices += layer.lines
    return layer


def _communication_hooks(plugin: Plugin) -> list[Hook]:
    from sglang_fl.comm.audit import HookClock
    from sglang_fl.comm.communicator import dump_on_signal
    from sglang_fl.comm.ledger import Ledger
    from sglang_fl.comm.monitor import MONITOR
    from sglang_fl.comm.policy import describe_order, puts_first
    from sglang_fl.platform import PLATFORMS
    from sglang_fl.selection import Kind
    from sglang_fl.sglang_hooks import coordinator, cpu, fused_all_reduce, graph_mixing, groups, symmetric_pool

    settings = plugin.settings
    data = PLATFORMS.get(plugin.platform or "")
    chip = find_chip(plugin.platform or "")
    vendor_backend = "" if data is None or chip is None else data.vendor_backend
    is_native = bool(vendor_backend) and chip is not None and puts_first(settings, vendor_backend or "", chip.vendor)
    chosen = f"{describe_order(settings)}, {_mode(settings)}"
    reason = f"{chosen}; SGLang's own methods, none of them is hooked" if is_native else chosen
    plugin.layers.append(LayerState(COMM_LAYER, not is_native, reason))
    if not settings.comm.record and not is_native:
        where = settings.source("comm.record").where
        plugin.notices.append(f"communication is neither recorded nor watched, but for its creation (from {where})")
    native_kinds = frozenset({Kind.VENDOR})
    versions = {"sglang_fl": __version__, **installed_versions()}
    state = groups.Groups(settings, versions, native_kinds)
    hooks = state.own_hooks()
    if not is_native:
        coordinator.prepare()
        method_hooks = coordinator.METHOD_HOOKS
        if settings.comm.audit is not None:
            state.clock, state.ledger = HookClock(), Ledger()
            state.ledger.watch_torch()
            method_hooks = coordinator.audited_hooks(state.clock, state.ledger)
        coordinator.let_dynamo_trace(method_hooks)
        hooks += method_hooks
        device_type = "" if data is None else data.device_type
        hooks += graph_mixing.hooks(settings, device_type, lambda line: plugin.notice(f"{COMM_LAYER}: {line}"))
        hooks += state.failure_hooks(has_graphs=plugin.platform == "cuda")
        if plugin.platform == "cuda":
            hooks += fused_all_reduce.hooks(settings.comm.mode)
            hooks += symmetric_pool.hooks()
        if settings.comm.record and parent_process() is not None:
            # From the start of a scheduler on: SIGUSR1 would end a process that has no handler.
            MONITOR.dump_folder = settings.comm.dump_dir
            dump_on_signal()
    if plugin.platform == "cpu":
        hooks += cpu.hooks()
    plugin.groups = state
    return hooks


__all__ = [
    "CommBackend",
    "ConfigurationError",
    "Plugin",
    "activate_platform",
    "active_platform",
    "load_plugin",
]
