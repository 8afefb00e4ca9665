"""What can be switched off, wholly or item by item, and the variables that do it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points

from sglang_fl.config import CommMode, Settings

PLUGIN = "sglang_fl"
GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
# Operations that mode fastest routes one by one; everything else goes with the group's backend.
ROUTED = ("all_reduce", "all_gather", "reduce_scatter")
OTHER_OPERATIONS = "operations without a route of their own (broadcast, gather, send, recv)"
COMMUNICATOR = "communicator"

Variables = dict[str, "str | None"]
"""Name to value; None: not set."""


class Part(Enum):
    """What a start has or has not, in the order in which parts are added to SGLang; the value is for people."""

    PLUGIN = "the plugin itself (its platform, all layers off)"
    OPERATORS = "layer 2, fused operators"
    ATEN = "layer 1, ATen operators"
    COMMUNICATION = "layer 3, communication"


LAYERS = (Part.OPERATORS, Part.ATEN, Part.COMMUNICATION)


@dataclass(frozen=True)
class Setup:
    """One way to start the server.

    title: for people. parts: what is on; none: SGLang alone. narrowed: the part of which only ``items`` are on.
    without: the items of ``narrowed`` that are off, where that is how it is meant.
    """

    title: str
    parts: tuple[Part, ...] = ()
    narrowed: Part | None = None
    items: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


NATIVE = Setup("SGLang alone")
LAYERS_OFF = Setup("the plugin, all layers off", (Part.PLUGIN,))
AS_CONFIGURED = Setup("everything as configured", tuple(Part))


@dataclass(frozen=True)
class Configured:
    """What the user's own settings are, on which the starts build.

    settings: of this environment. own_backend: the communication backend that stands for SGLang's own (``nccl``,
    ``hccl``, else ``torch``).
    """

    settings: Settings
    own_backend: str

    def variables(self, setup: Setup) -> Variables:
        """What the start changes in the user's environment."""
        if Part.PLUGIN not in setup.parts:
            return without_plugin(os.environ)
        changed: Variables = {}
        for layer in LAYERS:
            if layer not in setup.parts:
                changed |= self._off(layer)
        if setup.narrowed is not None and setup.without:
            changed |= self._without(setup.narrowed, setup.without)
        elif setup.narrowed is not None:
            changed |= self._only(setup.narrowed, setup.items)
        return changed

    def _off(self, layer: Part) -> Variables:
        if layer is Part.OPERATORS:
            return {"SGLANG_FL_OOT_ENABLED": "0"}
        if layer is Part.ATEN:
            return {"USE_FLAGGEMS": "0"}
        return {
            "SGLANG_FL_DIST_BACKEND": self.own_backend,
            "SGLANG_FL_COMM_MODE": "all",
            **self._own_communicator_order(),
        }

    def _own_communicator_order(self) -> Variables:
        """An order for ``communicator`` wins over the backend, so it has to say the same."""
        if not self.settings.ops.backends_for(COMMUNICATOR):
            return {}
        entries = self.settings.text("ops.backends").split(";")
        others = [entry for entry in entries if not entry.startswith(f"{COMMUNICATOR}=")]
        kind = "reference" if self.own_backend == "torch" else "vendor"
        return {"SGLANG_FL_PER_OP": ";".join([*others, f"{COMMUNICATOR}={kind}"])}

    def _only(self, layer: Part, items: tuple[str, ...]) -> Variables:
        if layer is Part.OPERATORS:
            return {"SGLANG_FL_OOT_WHITELIST": ",".join(items), "SGLANG_FL_OOT_BLACKLIST": None}
        if layer is Part.ATEN:
            return {"SGLANG_FL_FLAGOS_WHITELIST": ",".join(items), "SGLANG_FL_FLAGOS_BLACKLIST": None}
        return self._routes([operation for operation in ROUTED if operation not in items])

    def _without(self, layer: Part, items: tuple[str, ...]) -> Variables:
        if layer is Part.COMMUNICATION:
            return self._off(layer) if OTHER_OPERATIONS in items else self._routes(items)
        section, variable = ("ops", "SGLANG_FL_OOT") if layer is Part.OPERATORS else ("aten", "SGLANG_FL_FLAGOS")
        white = self.settings.value(f"{section}.whitelist")
        if white is None:
            black = dict.fromkeys([*self.settings.value(f"{section}.blacklist"), *items])
            return {f"{variable}_BLACKLIST": ",".join(black)}
        kept = [name for name in white if name not in items]
        return {f"{variable}_WHITELIST": ",".join(kept)} if kept else self._off(layer)

    def _routes(self, native: list[str] | tuple[str, ...]) -> Variables:
        """SGLang's own method for the operations ``native``, what is configured for the others."""
        if not native:
            return {}
        comm = self.settings.comm
        kept = comm.routes if comm.mode is CommMode.FASTEST else ()
        entries = [f"{order.op}={'|'.join(map(str, order.routes))}" for order in kept if order.op not in native]
        routes = ";".join([*(f"{operation}=native" for operation in native), *entries])
        return {"SGLANG_FL_COMM_MODE": "fastest", "SGLANG_FL_COMM_ROUTES": routes}


def without_plugin(environ: Mapping[str, str]) -> Variables:
    """SGLang with every plugin that it would load, but for this one."""
    selected = _names(environ.get("SGLANG_PLUGINS", ""))
    installed = [entry.name for group in GROUPS for entry in entry_points(group=group) if entry.name != PLUGIN]
    kept = [name for name in dict.fromkeys(installed) if not selected or name in selected]
    changed: Variables = {"SGLANG_PLUGINS": ",".join(kept) or "__none__"}
    if environ.get("SGLANG_PLATFORM") == PLUGIN:
        changed["SGLANG_PLATFORM"] = None
    return changed


def is_plugin_selected(environ: Mapping[str, str]) -> bool:
    """Whether SGLang would load this plugin at all."""
    selected = _names(environ.get("SGLANG_PLUGINS", ""))
    return not selected or PLUGIN in selected


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def own_backend(platform: str | None) -> str:
    """The communication backend under which a group keeps what SGLang alone uses on ``platform``."""
    from sglang_fl.platform import PLATFORMS

    data = PLATFORMS.get(platform or "")
    return (data.vendor_backend if data is not None else None) or "torch"
