"""Layer 1 in one process: what is known of it before FlagGems is imported, and switching it on, once."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_fl.aten import gems as flag_gems
from sglang_fl.aten import records
from sglang_fl.aten.plan import Plan, make_plan
from sglang_fl.config import AtenProfile, Settings, SourceKind

if TYPE_CHECKING:
    from sglang_fl.aten.planned import Replacement
    from sglang_fl.aten.sweep.results import Table

logger = logging.getLogger("sglang_fl.aten")

STORED_TABLES = {"nvidia.yaml": Path(__file__).with_name("data") / "nvidia_sweep.csv"}
_OFF_SWITCHES = "SGLANG_FL_FLAGOS_PROFILE=full replaces every operator that FlagGems has"
_EXPLICIT = (SourceKind.ENVIRONMENT, SourceKind.YAML)
_REGISTERING = "failed while it registered"
_lock = threading.Lock()
_outcome: Outcome | None = None
# What is registered lives as long as this.
_library: Any = None
# What profile verified has registered, with the platform's table.
_replacement: Replacement | None = None
# What profile verified registers while graphs are captured, with a list that has no table.
_in_graphs: tuple[flag_gems.Gems, Plan] | None = None


@dataclass(frozen=True)
class Outcome:
    """On or off, why, and what else the report must say."""

    is_on: bool
    reason: str
    warnings: tuple[str, ...] = ()


class AtenError(RuntimeError):
    """Layer 1 was asked for, strictly, and cannot be had; the message says why."""


def before_import(settings: Settings, platform: str | None) -> Outcome:
    """What can be said of the layer without importing FlagGems, which takes seconds and touches the device.

    platform: the platform in use, None for an accelerator that this version does not know but FlagGems may.

    Raises:
        AtenError: the layer is off, was asked for, and ``strict`` is set.
    """
    reason = _off_reason(settings, platform)
    if reason is not None:
        return _off(settings, reason)
    version = flag_gems.installed_version() or "of unknown version"
    return Outcome(
        True, f"FlagGems {version}, {_intention(settings)}; in processes that run a model, once it has its device"
    )


def switch_on(settings: Settings) -> Outcome:
    """Put FlagGems' operators under PyTorch, in this process, for good. The device must be set before.

    The first call decides; every further one has its outcome. A layer that cannot be switched on is off, with its
    reason, and PyTorch has its own operators.

    Raises:
        AtenError: it cannot be switched on, was asked for, and ``strict`` is set.
    """
    global _outcome
    with _lock:
        if _outcome is None:
            _outcome = _switch_on(settings)
        return _outcome


def has_part_for_graphs(settings: Settings) -> bool:
    """Whether other operators are replaced in what a graph captures than outside of it: profile verified."""
    return _is_verified(settings)


def stored_table(settings: Settings) -> Path | None:
    """The table of the calls that were measured for the list in use; None for a list of the user's."""
    found = STORED_TABLES.get(settings.source("aten.verified").where)
    return found if found is not None and found.exists() else None


def _is_verified(settings: Settings) -> bool:
    return settings.aten.whitelist is None and settings.aten.profile is AtenProfile.VERIFIED


@contextmanager
def capturing() -> Iterator[None]:
    """Around the capture of graphs and the calls that warm it up: inside, the operators of profile verified are
    FlagGems'. Nothing changes where the layer is off or replaces operators everywhere.
    """
    if _replacement is not None:
        with _replacement.capturing():
            yield
        return
    if _in_graphs is None:
        yield
        return
    try:
        _register(*_in_graphs)
    except flag_gems.GemsError as error:
        logger.warning("[sglang_fl] layer 1, ATen operators: none is replaced in these graphs: %s", error)
    try:
        yield
    finally:
        _take_back()


def is_asked_for(settings: Settings) -> bool:
    """Whether a user's own setting, not a default, wants the layer."""
    fields = ("aten.enabled", "aten.profile", "aten.whitelist", "aten.verified")
    return settings.aten.enabled and any(settings.source(field).kind in _EXPLICIT for field in fields)


def _off_reason(settings: Settings, platform: str | None) -> str | None:
    aten = settings.aten
    if not aten.enabled:
        return f"{settings.source('aten.enabled').where} switches it off"
    if platform == "cpu":
        return "this process runs on the CPU, for which FlagGems has no device"
    if flag_gems.why_unusable():
        return flag_gems.why_unusable()
    if _is_verified(settings) and not aten.verified:
        return f"profile verified, and no operator has been verified on this platform; {_OFF_SWITCHES}"
    return None


def _intention(settings: Settings) -> str:
    aten = settings.aten
    if aten.whitelist is not None:
        return f"white list of {len(aten.whitelist)} names"
    if aten.profile is AtenProfile.FULL:
        return "profile full"
    where = "inside CUDA graphs" if stored_table(settings) is None else "for the calls that were measured"
    return f"profile verified of {len(aten.verified)} names, {where}"


def _off(settings: Settings, reason: str, *more: str) -> Outcome:
    if settings.ops.strict and is_asked_for(settings):
        raise AtenError(
            f"sglang_fl: layer 1, ATen operators, was asked for and cannot be switched on: {reason}. "
            f"{settings.source('ops.strict').where} makes that an error; SGLANG_FL_STRICT=0 serves without the layer."
        )
    return Outcome(False, reason, more)


def _switch_on(settings: Settings) -> Outcome:
    try:
        return _replace_operators(settings)
    except flag_gems.GemsError as error:
        return _off(settings, str(error))


def _replace_operators(settings: Settings) -> Outcome:
    gems = flag_gems.load()
    accelerator = torch.accelerator.current_accelerator()
    device = accelerator.type if accelerator is not None else "cpu"
    if gems.device != device:
        return _off(settings, f"FlagGems {gems.version} was set up for {gems.vendor} ({gems.device}), not for {device}")
    plan = make_plan(settings, gems)
    if plan.unknown and settings.ops.strict:
        raise AtenError(" ".join(f"sglang_fl: {text}" for text in plan.unknown))
    if not plan.names:
        return _off(settings, f"{plan.chosen_by} leaves no operator to replace", *plan.unknown)
    table_file = stored_table(settings) if _is_verified(settings) else None
    if table_file is not None:
        return _replace_measured(settings, gems, plan, table_file)
    return _replace_all(settings, gems, plan)


def _replace_all(settings: Settings, gems: flag_gems.Gems, plan: Plan) -> Outcome:
    """Put FlagGems' functions in the operators' place as FlagGems does, for good or for graphs."""
    global _in_graphs
    done = _register(gems, plan)
    failed = _not_registered(gems, plan, done)
    if not done:
        return _off(settings, f"FlagGems {gems.version} registered no operator", *plan.unknown, *failed)
    if failed and not plan.is_everything and settings.ops.strict and is_asked_for(settings):
        _take_back()
        raise AtenError(f"sglang_fl: {plan.chosen_by}: {failed[0]}. SGLANG_FL_STRICT=0 serves with the rest.")
    if _is_verified(settings):
        _take_back()
        _in_graphs = gems, plan
    more = [*plan.unknown, *failed, *_start_records(settings, gems)]
    return Outcome(True, _report(settings, gems, plan, done), tuple(more))


def _replace_measured(settings: Settings, gems: flag_gems.Gems, plan: Plan, table_file: Path) -> Outcome:
    """Replace the measured calls of the table's operators, for good, and more of them in graphs."""
    global _replacement
    from sglang_fl.aten import launches
    from sglang_fl.aten.planned import Replacement
    from sglang_fl.aten.sweep.results import LEAST_EAGER_GAIN_US, Table, TableError

    problem = launches.is_supported()
    if problem:
        return _off(settings, f"profile verified keeps FlagGems' launches, and {problem}", *plan.unknown)
    try:
        table = Table.read(table_file)
    except (TableError, OSError) as error:
        return _off(settings, f"the table of the measured calls cannot be read: {error}", *plan.unknown)
    with flag_gems.foreign_code(gems.version, _REGISTERING):
        replacement = Replacement(
            _CountingLibrary,
            gems,
            plan.names,
            table.forms(),
            table.eager(),
            LEAST_EAGER_GAIN_US,
            exact_only=_world_size() > 1,
            keeps_plans=not settings.aten.record,
        )
    if not replacement.in_graphs:
        replacement.take_back()
        return _off(settings, f"no call of {', '.join(plan.names)} was measured", *plan.unknown)
    _replacement = replacement
    more = [*plan.unknown, *_start_records(settings, gems)]
    return Outcome(True, _report_measured(settings, gems, plan, table), tuple(more))


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _report_measured(settings: Settings, gems: flag_gems.Gems, plan: Plan, table: Table) -> str:
    assert _replacement is not None
    mine, recorded = table.call_share()
    origin = table.origin
    names = _replaced_names(gems, plan, [operator.operator for operator in _replacement.in_graphs])
    called = [name for name in table.called() if name in names]
    eager = ", ".join(operator.operator for operator in _replacement.eager) or "none"
    parts = [
        f"FlagGems {gems.version} on {gems.vendor}: {plan.chosen_by} replaces {len(names)} operators for the "
        f"calls that were measured to be right and not slower, inside CUDA graphs ({len(_replacement.in_graphs)} ATen "
        f"overloads) and, where it saves more than it costs on the host, outside ({eager}); {mine} of {recorded} "
        f"device calls of {origin['model']} that FlagGems has kernels for, of {', '.join(called)}"
    ]
    if origin["flag_gems"] != gems.version:
        parts.append(f"measured with FlagGems {origin['flag_gems']}, which this is not")
    if _world_size() > 1:
        parts.append("with more than one rank only where values are PyTorch's bit for bit")
    if plan.left_out:
        parts.append(f"left to PyTorch: {', '.join(plan.left_out)}")
    parts += _not_replaced(settings, plan)
    parts.append(", ".join(names))
    return "; ".join(parts)


class _CountingLibrary(torch.library.Library):
    """A library that notes what was registered in it: FlagGems only logs what it could not register.

    What PyTorch has no operator for, which nothing would ever call, is not registered.
    """

    def __init__(self) -> None:
        super().__init__("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch has no types here
        self.done: list[str] = []

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Register and note; an operator may be registered for more than one dispatch key."""
        if not flag_gems.has_schema(op_name):
            return
        super().impl(op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]  # torch has no types here
        self.done.append(op_name)


def _register(gems: flag_gems.Gems, plan: Plan) -> list[str]:
    """The ATen operators that are registered; what was, before FlagGems failed, is taken back.

    Raises:
        GemsError: it failed.
    """
    global _library
    library = _library = _CountingLibrary()
    try:
        with flag_gems.foreign_code(gems.version, _REGISTERING), warnings.catch_warnings():
            # PyTorch warns of each kernel that is put over another; that is what is wanted here.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            if plan.is_everything:
                gems.module.enable(lib=library, unused=[*plan.left_out, *plan.wrong])
            else:
                gems.module.only_enable(lib=library, include=list(plan.names))
    except BaseException:
        _take_back()
        raise
    return list(dict.fromkeys(library.done))


def _take_back() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _start_records(settings: Settings, gems: flag_gems.Gems) -> list[str]:
    aten = settings.aten
    if not aten.record:
        return []
    distributed = torch.distributed
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    where = settings.source("aten.log_path").where
    try:
        path = records.start(aten.log_path, rank, aten.log_once, gems.entries)
    except records.RecordError as error:
        return [f"the ATen operators are not recorded: {error} (from {where})"]
    logger.info("[sglang_fl] layer 1, ATen operators: recorded in %s", path)
    return []


def _report(settings: Settings, gems: flag_gems.Gems, plan: Plan, done: list[str]) -> str:
    names = _replaced_names(gems, plan, done)
    parts = [
        f"FlagGems {gems.version} on {gems.vendor}: {plan.chosen_by} replaces {len(names)} operators "
        f"({len(done)} ATen overloads){' inside CUDA graphs' if _is_verified(settings) else ''}"
    ]
    parts += _not_replaced(settings, plan)
    if plan.left_out:
        shown = ", ".join(plan.left_out[:10]) + (", ..." if len(plan.left_out) > 10 else "")
        parts.append(f"left to PyTorch: {shown}")
    if plan.wrong:
        where = settings.source("aten.wrong").where
        parts.append(f"left to PyTorch as wrong on this platform ({where}): {', '.join(plan.wrong)}")
    if not plan.is_everything:
        parts.append(", ".join(names))
    return "; ".join(parts)


def _replaced_names(gems: flag_gems.Gems, plan: Plan, keys: Collection[str]) -> list[str]:
    """FlagGems' functions that stand for the ATen operators ``keys``."""
    return [name for name in plan.names if any(key in keys for key in gems.keys([name]))]


def _not_registered(gems: flag_gems.Gems, plan: Plan, done: Collection[str]) -> list[str]:
    """What FlagGems passed over, in one text; nothing where it registered all that it should have."""
    keys = [key for key in gems.keys(plan.names) if key not in done and flag_gems.has_schema(key)]
    return [f"FlagGems {gems.version} did not register {', '.join(keys)}; PyTorch's own operators stay"] if keys else []


def _not_replaced(settings: Settings, plan: Plan) -> list[str]:
    """What is meant and not here, and no fault of the user's."""
    parts = []
    if plan.without_schema:
        names = ", ".join(plan.without_schema)
        parts.append(f"torch {torch.__version__} has no operators for FlagGems' {names}")
    if plan.not_here:
        parts.append(f"this FlagGems has not {', '.join(plan.not_here)}, of the platform's own lists")
    return parts
