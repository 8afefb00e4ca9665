"""What a start with everything on leaves behind: which layers were active, and which operators and collectives ran."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_fl.bisect.parts import LAYERS, OTHER_OPERATIONS, ROUTED, Part, Variables
from sglang_fl.testing.audits import ProcessAudit, read_audit

_LAYER_LINE = re.compile(r"\[sglang_fl\] (?P<layer>layer \d, [^:]+): (?P<state>on|off): (?P<reason>.*)")
_SHARED_GROUP = re.compile(r"\[sglang_fl\] group (?P<group>\S+) ranks \[\d+(?:, \d+)+\]: (?P<backend>[\w.]+)")
_DISPATCH_LINE = re.compile(r"\[OOT-DISPATCH\] (?P<name>\S+) → (?P<implementation>.*)")
_RECORD_LINE = re.compile(r"\[\w+\] [\w.]*\.(?P<function>\w+): ")
# Lines with which SGLang alone ends where the plugin could help: no device that it knows, no package of kernels. Not
# a model that is missing, an argument, too little memory or time: those are the same with the plugin.
_NEEDS_PLUGIN = re.compile(
    r"^(?:\[[^\]]*\] )?(?:"
    r"(?:\w+\.)*(?:ImportError|ModuleNotFoundError|AttributeError|NotImplementedError|KernelNotAvailableError): "
    r"|(?:\w+\.)*\w+(?:Error|Exception): .*(?:No accelerator|Unsupported device|not compiled with|NVIDIA driver|"
    r"no kernel image|cannot open shared object|undefined symbol|sgl_kernel|Could not run '))"
    r".*$",
    re.MULTILINE,
)
# The audit is written twice a second.
AUDIT_SETTLES_S = 1.5


@dataclass(frozen=True)
class Files:
    """Where a start writes what it ran; a rank N > 0 writes PATH.rankN."""

    dispatch: Path
    aten: Path
    audit: Path

    @classmethod
    def of(cls, folder: Path, label: str) -> Files:
        """The files of the start ``label``."""
        return cls(*(folder / f"{label}.{kind}" for kind in ("dispatch", "aten", "audit.json")))

    def clear(self) -> None:
        """Remove what an earlier run left in the folder: the plugin appends."""
        for kind in (self.dispatch, self.aten, self.audit):
            for path in _of_ranks(kind):
                path.unlink()

    def variables(self) -> Variables:
        """What makes the plugin write them."""
        return {
            "SGLANG_FL_DISPATCH_LOG": str(self.dispatch),
            "SGLANG_FLAGGEMS_RECORD": "1",
            "SGLANG_FLAGGEMS_LOG_PATH": str(self.aten),
            "SGLANG_FLAGGEMS_LOG_ONCE": "1",
            "SGLANG_FL_COMM_AUDIT": str(self.audit),
            "SGLANG_FL_LOG_LEVEL": "INFO",
        }

    def operators(self) -> dict[str, str]:
        """Fused operator class to the implementation that it got, in the order in which they were bound."""
        lines = (line for path in _of_ranks(self.dispatch) for line in path.read_text().splitlines())
        return _matches(_DISPATCH_LINE, lines, "name", "implementation")

    def aten_functions(self) -> list[str]:
        """FlagGems' functions that ran, in the order of their first call."""
        lines = (line for path in _of_ranks(self.aten) for line in path.read_text().splitlines())
        return list(_matches(_RECORD_LINE, lines, "function", "function"))

    def collectives(self) -> dict[str, list[str]]:
        """Operation, or OTHER_OPERATIONS, to the groups of more than one rank that called it."""
        audits = [read_audit(path) for path in _of_ranks(self.audit)]
        found: dict[str, list[str]] = {}
        for operation, group in _called(audits):
            groups = found.setdefault(operation, [])
            if group not in groups:
                groups.append(group)
        return found


@dataclass(frozen=True)
class LayerStates:
    """What the log says of the layers.

    active: those that were on and had something to do. not_off: those that were not said to be off. reasons: of every
    layer, on or off. backends: of the groups of more than one rank.
    """

    active: tuple[Part, ...]
    not_off: tuple[Part, ...]
    reasons: dict[Part, str]
    backends: dict[str, str]


def needs_plugin(log: str) -> str:
    """The line of the log of SGLang alone that says that it cannot run on this machine by itself; "" if none does."""
    found = _NEEDS_PLUGIN.search(log)
    return "" if found is None else found[0].strip()


def layer_states(log: str) -> LayerStates:
    """Read the plugin's report; where a layer reports twice, as ATen operators do, the last word counts."""
    lines = log.splitlines()
    last = {match["layer"]: match for line in lines if (match := _LAYER_LINE.search(line))}
    backends = {match["group"]: match["backend"] for line in lines if (match := _SHARED_GROUP.search(line))}
    reasons = {
        part: f"{last[part.value]['state']}: {last[part.value]['reason']}" for part in LAYERS if part.value in last
    }
    not_off = tuple(part for part in LAYERS if not reasons.get(part, "").startswith("off:"))
    active = [part for part in not_off if part in reasons]
    if Part.COMMUNICATION in active and not backends:
        active.remove(Part.COMMUNICATION)
        reasons[Part.COMMUNICATION] = "off: no group has more than one rank"
    return LayerStates(tuple(active), not_off, reasons, backends)


def _called(audits: Iterable[ProcessAudit]) -> Iterator[tuple[str, str]]:
    for audit in audits:
        for group in audit.shared_groups:
            for method, calls in group.calls.items():
                if calls:
                    yield _operation_of(method), f"{group.name} ({group.backend})"


def _operation_of(method: str) -> str:
    """The routed operation that a GroupCoordinator method is built on."""
    plain = method.replace("allreduce", "all_reduce")
    return next((operation for operation in ROUTED if operation in plain), OTHER_OPERATIONS)


def _of_ranks(path: Path) -> list[Path]:
    return [each for each in (path, *sorted(path.parent.glob(f"{path.name}.rank*"))) if each.exists()]


def _matches(pattern: re.Pattern[str], lines: Iterable[str], key: str, value: str) -> dict[str, str]:
    return {match[key]: match[value] for line in lines if (match := pattern.search(line))}
