"""What is compared: SGLang alone and with the plugin, as one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PLUGIN = "sglang_fl"
PIECEWISE_OFF = "--disable-piecewise-cuda-graph"
BACKEND_VARIABLE = "SGLANG_FL_DIST_BACKEND"
FLAGCX_BACKEND = "flagcx"


@dataclass(frozen=True)
class Configuration:
    """One kind of server.

    Attributes:
        name: as in the rows.
        meaning: for the help.
        layers: those of the plugin that must be on where there is a GPU; without any, the plugin is not loaded.
        environment: the plugin's settings; {recorded} is a file in the folder of the run.
        arguments: of SGLang's server, where there is a GPU.
        bar: the largest ratio of decode and prefill to native's; None: shown only.
        is_timed: False for one that runs slower for reasons of its own.
    """

    name: str
    meaning: str
    layers: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = (PIECEWISE_OFF,)
    bar: float | None = None
    is_timed: bool = True

    @property
    def has_flagcx(self) -> bool:
        """Whether FlagCX must carry every group of more than one rank."""
        return self.environment.get(BACKEND_VARIABLE) == FLAGCX_BACKEND


NATIVE = "native"
# SGLang's own methods of groups: none is hooked.
OWN_GROUPS = {BACKEND_VARIABLE: "nccl"}
ATEN_ONLY = {"SGLANG_FL_OOT_ENABLED": "0", **OWN_GROUPS}
RECORD = {"SGLANG_FLAGGEMS_RECORD": "1", "SGLANG_FLAGGEMS_LOG_ONCE": "0", "SGLANG_FLAGGEMS_LOG_PATH": "{recorded}"}
FLAGCX = {BACKEND_VARIABLE: FLAGCX_BACKEND}

_ALL = (
    Configuration(NATIVE, "SGLang alone"),
    Configuration("native-defaults", "SGLang alone with its own default: piecewise CUDA graphs on", arguments=()),
    Configuration("verified", "layer 1 alone, profile verified", (1,), ATEN_ONLY, bar=1.0),
    Configuration(
        "recording",
        "verified, and which operators of it ran; not timed",
        (1,),
        {**ATEN_ONLY, **RECORD},
        is_timed=False,
    ),
    Configuration("full", "layer 1 alone, profile full", (1,), {**ATEN_ONLY, "SGLANG_FL_FLAGOS_PROFILE": "full"}),
    Configuration("layers-12", "layers 1 and 2, no FlagCX", (1, 2), OWN_GROUPS),
    Configuration(
        "fastest",
        "all three layers, FlagCX in mode fastest",
        (1, 2, 3),
        {**FLAGCX, "SGLANG_FL_COMM_MODE": "fastest"},
        bar=1.0,
    ),
    Configuration(
        "flagcx", "all three layers, FlagCX in mode all", (1, 2, 3), {**FLAGCX, "SGLANG_FL_COMM_MODE": "all"}, bar=1.05
    ),
)
CONFIGURATIONS = {configuration.name: configuration for configuration in _ALL}
