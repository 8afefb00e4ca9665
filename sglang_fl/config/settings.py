"""The settings of one process: frozen, grouped by subject, each value with its source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_fl.config.chips import canonical_vendor
from sglang_fl.config.fields import FIELD_BY_NAME, FIELDS
from sglang_fl.config.problems import Problem, closest
from sglang_fl.config.sources import Source
from sglang_fl.config.value_types import Names
from sglang_fl.config.values import (
    AtenProfile,
    BackendKind,
    CommBackend,
    CommMode,
    CommRouteOrder,
    GraphMixing,
    LogLevel,
    OpBackend,
    OpOrder,
)


@dataclass(frozen=True)
class OpsSettings:
    """Layer 2, fused operators. ``strict`` and the vendor lists (canonical names) hold for layer 3 as well."""

    enabled: bool
    prefer: BackendKind
    backends: tuple[OpOrder, ...]
    blacklist: tuple[str, ...]
    whitelist: tuple[str, ...] | None
    strict: bool
    deny_vendors: tuple[str, ...]
    allow_vendors: tuple[str, ...] | None
    dispatch_log: Path | None

    def backends_for(self, op: str) -> tuple[OpBackend, ...]:
        """The order set for one operator, () where none is set and ``prefer`` decides."""
        return next((order.backends for order in self.backends if order.op == op), ())


@dataclass(frozen=True)
class AtenSettings:
    """Layer 1, PyTorch's operators on FlagGems. A white list replaces the profile, a black list takes from it."""

    enabled: bool
    profile: AtenProfile
    verified: tuple[str, ...]
    wrong: tuple[str, ...]
    whitelist: tuple[str, ...] | None
    blacklist: tuple[str, ...]
    record: bool
    log_path: Path | None
    log_once: bool

    def used_lists(self) -> tuple[str, ...]:
        """The fields with names of operators that count, by white list and profile; the others are idle."""
        if self.whitelist is not None:
            return ("aten.whitelist",)
        return ("aten.blacklist", "aten.wrong" if self.profile is AtenProfile.FULL else "aten.verified")


@dataclass(frozen=True)
class CommSettings:
    """Layer 3, communication. backend is FLAGCX where only ``flagcx_path`` is set.

    timeout_s: seconds, None where SGLang's --dist-timeout or 600 counts; dump_dir: None for the user's own folder.
    """

    backend: CommBackend
    mode: CommMode
    routes: tuple[CommRouteOrder, ...]
    graph_mixing: GraphMixing
    flagcx_path: Path | None
    audit: Path | None
    timeout_s: float | None
    create_timeout_s: float
    record: bool
    dump_dir: Path | None


@dataclass(frozen=True)
class SystemSettings:
    """What belongs to no layer.

    platform: cuda, ascend, musa, cpu, the name of another detected device, or None where none was detected.
    """

    config_file: Path | None
    platform: str | None
    log_level: LogLevel
    attention_backend: str | None


class SettingRow(NamedTuple):
    """One line of a report: the field's name, its value in the notation of its variable, its source."""

    field: str
    value: str
    source: Source


@dataclass(frozen=True)
class Settings:
    """Everything that was configured. sources: (field name, source) per field, in the table's order."""

    ops: OpsSettings
    aten: AtenSettings
    comm: CommSettings
    system: SystemSettings
    sources: tuple[tuple[str, Source], ...]
    warnings: tuple[str, ...] = ()

    def value(self, field: str) -> Any:
        """The value of a field by its name, such as "comm.backend"; KeyError for a name that is none."""
        entry = FIELD_BY_NAME[field]
        return getattr(getattr(self, entry.section), entry.attribute)

    def source(self, field: str) -> Source:
        """Where the value of a field came from; KeyError for a name that is none."""
        return dict(self.sources)[field]

    def text(self, field: str) -> str:
        """The value of a field in the notation of its variable: equal text for equal meaning."""
        return FIELD_BY_NAME[field].type.to_text(self.value(field))

    def rows(self) -> Iterator[SettingRow]:
        """Every field with value and source, in the table's order."""
        for field in FIELDS:
            yield SettingRow(field.name, self.text(field.name), self.source(field.name))

    def comparable(self) -> dict[str, str]:
        """Field name to text, for the fields that all ranks of a server must share.

        Left out is what may differ from node to node without changing a result: paths of files (logs,
        SGLANG_FL_CONFIG, FLAGCX_PATH), what is logged, and the platform, since FlagCX joins different chips.
        The backend that a FLAGCX_PATH implies is ``comm.backend`` and is compared.
        """
        return {field.name: self.text(field.name) for field in FIELDS if field.compared}

    def digest(self) -> str:
        """SHA-256 of :meth:`comparable`, in hexadecimal: equal on all ranks of a sound server."""
        canonical = json.dumps(self.comparable(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def unknown_names(self, field: str, known: Iterable[str]) -> tuple[Problem, ...]:
        """The names of a list or per-operator field that are not among `known`, each as a problem.

        Only a layer knows its operators and vendors, so it asks here, with the complete list, and either
        raises ``SettingsError`` with the problems or shows their texts. Vendors are compared by canonical
        name; for ``ops.backends`` the names are the operators.
        """
        names_type = FIELD_BY_NAME[field].type
        value = self.value(field) or ()
        names = [item.op if isinstance(item, OpOrder) else item for item in value]
        vendors = isinstance(names_type, Names) and names_type.canonical is canonical_vendor
        choices = {canonical_vendor(name) if vendors else name for name in known}
        return tuple(self._unknown_name(field, name, choices) for name in names if name not in choices)

    def _unknown_name(self, field: str, name: str, choices: set[str]) -> Problem:
        suggestion = closest(name, sorted(choices))
        shown = sorted(choices)
        allowed = ", ".join(shown) if len(shown) <= 20 else f"one of {len(shown)} known names"
        return Problem(
            where=self.source(field).where,
            field=field,
            found=repr(name),
            allowed=allowed,
            action="Correct the name or remove it.",
            suggestion=repr(suggestion) if suggestion else None,
        )
