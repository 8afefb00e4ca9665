"""The one table of settings: loader, reports, sample.yaml and the documents are all made from it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_fl.config.chips import canonical_vendor
from sglang_fl.config.route_type import CommRoutes
from sglang_fl.config.value_types import (
    Boolean,
    Names,
    OpOrders,
    PathText,
    Seconds,
    Text,
    ValueType,
    choice_of,
    choice_of_platforms,
    without_namespace,
)
from sglang_fl.config.values import AtenProfile, BackendKind, CommBackend, CommMode, GraphMixing, LogLevel

SECTIONS = {
    "ops": "Layer 2: fused operators",
    "aten": "Layer 1: ATen operators (FlagGems)",
    "comm": "Layer 3: communication",
    "system": "System",
}
LAYERS = {"ops": 2, "aten": 1, "comm": 3, "system": None}


@dataclass(frozen=True)
class Field:
    """One setting.

    name: ``section.attribute`` of :class:`sglang_fl.config.Settings`; variable: its environment variable;
    yaml_key: its key in YAML, "comm.x" for x inside the mapping comm, None if YAML cannot hold it;
    type: parser and notation; default: the value when no source has one; doc: one line for users;
    example: a value in the variable's notation; compared: whether all ranks must have the same;
    opposite: the field of the same section that must not be set beside this one;
    user_only: whether the platform's own YAML may not hold it.
    """

    name: str
    variable: str
    yaml_key: str | None
    type: ValueType
    default: object
    doc: str
    example: str
    compared: bool = True
    opposite: str | None = None
    user_only: bool = False

    @property
    def section(self) -> str:
        """The part of Settings that holds the field: ops, aten, comm or system."""
        return self.name.partition(".")[0]

    @property
    def attribute(self) -> str:
        """The field's name inside its section."""
        return self.name.partition(".")[2]

    @property
    def layer(self) -> int | None:
        """The layer that the field belongs to, None for the system's."""
        return LAYERS[self.section]


_OPERATOR_CLASSES = "operator class names (SiluAndMul, RMSNorm, RotaryEmbedding, ...)"
_ATEN_OPERATORS = "ATen operator names as FlagGems spells them"
_ATEN_NAMES = Names(_ATEN_OPERATORS, bare=without_namespace)
_VENDORS = "vendor names (nvidia or cuda, ascend or npu, ...)"

FIELDS: tuple[Field, ...] = (
    Field(
        "ops.enabled", "SGLANG_FL_OOT_ENABLED", "oot_enabled", Boolean(), True,
        "Switches layer 2, the fused operators, on or off.", "0",
    ),
    Field(
        "ops.prefer", "SGLANG_FL_PREFER", "prefer", choice_of(BackendKind), BackendKind.FLAGOS,
        "The kind of implementation that is tried first, for every fused operator and for communication under auto.",
        "vendor",
    ),
    Field(
        "ops.backends", "SGLANG_FL_PER_OP", "op_backends", OpOrders(), (),
        "The order of backends for an operator, or for communicator, the groups; vendor:NAME asks for one vendor.",
        "rms_norm=vendor|flagos|reference;silu_and_mul=flagos|vendor:nvidia",
    ),
    Field(
        "ops.blacklist", "SGLANG_FL_OOT_BLACKLIST", "oot_blacklist", Names(_OPERATOR_CLASSES), (),
        "Fused operators that keep SGLang's own method. Excludes oot_whitelist.", "RotaryEmbedding",
        opposite="ops.whitelist",
    ),
    Field(
        "ops.whitelist", "SGLANG_FL_OOT_WHITELIST", "oot_whitelist",
        Names(_OPERATOR_CLASSES, may_be_empty=False), None,
        "The only fused operators that the plugin takes over. Excludes oot_blacklist.", "RMSNorm,SiluAndMul",
        opposite="ops.blacklist",
    ),
    Field(
        "ops.strict", "SGLANG_FL_STRICT", "strict", Boolean(), False,
        "No fallback: what is preferred but unusable is an error, for operators and for communication.", "1",
    ),
    Field(
        "ops.deny_vendors", "SGLANG_FL_DENY_VENDORS", "deny_vendors", Names(_VENDORS, canonical_vendor), (),
        "Vendors whose operators and communication are never used.", "nvidia",
    ),
    Field(
        "ops.allow_vendors", "SGLANG_FL_ALLOW_VENDORS", "allow_vendors",
        Names(_VENDORS, canonical_vendor, may_be_empty=False), None,
        "The only vendors whose operators and communication may be used; deny_vendors still removes from them.",
        "nvidia,ascend",
    ),
    Field(
        "ops.dispatch_log", "SGLANG_FL_DISPATCH_LOG", "dispatch_log", PathText(), None,
        "File that records which implementation each fused operator got.", "/tmp/dispatch.log",
        compared=False,
    ),
    Field(
        "aten.enabled", "USE_FLAGGEMS", "use_flaggems", Boolean(), True,
        "Switches layer 1, FlagGems' replacements of PyTorch's own operators, on or off.", "0",
    ),
    Field(
        "aten.profile", "SGLANG_FL_FLAGOS_PROFILE", "flagos_profile", choice_of(AtenProfile), AtenProfile.VERIFIED,
        "verified: FlagGems replaces the measured calls of the ATen operators in flagos_verified; full: all but "
        "flagos_wrong, everywhere.", "full",
    ),
    # FlagCX joins different chips in one server, and each has its own list.
    Field(
        "aten.verified", "SGLANG_FL_FLAGOS_VERIFIED", "flagos_verified", _ATEN_NAMES, (),
        "The ATen operators of profile verified: found right and not slower on this platform by aten-sweep.",
        "softmax,embedding", compared=False,
    ),
    Field(
        "aten.wrong", "SGLANG_FL_FLAGOS_WRONG", "flagos_wrong", _ATEN_NAMES, (),
        "ATen operators that profile full leaves to PyTorch: aten-sweep saw them fail or give wrong values here.",
        "mul", compared=False,
    ),
    Field(
        "aten.whitelist", "SGLANG_FL_FLAGOS_WHITELIST", "flagos_whitelist",
        Names(_ATEN_OPERATORS, may_be_empty=False, bare=without_namespace), None,
        "The only ATen operators that FlagGems replaces, whatever the profile. Excludes flagos_blacklist.",
        "softmax,embedding",
        opposite="aten.blacklist",
    ),
    Field(
        "aten.blacklist", "SGLANG_FL_FLAGOS_BLACKLIST", "flagos_blacklist", _ATEN_NAMES, (),
        "ATen operators that FlagGems does not replace. Excludes flagos_whitelist.", "mul,sub",
        opposite="aten.whitelist",
    ),
    Field(
        "aten.record", "SGLANG_FLAGGEMS_RECORD", "flaggems_record", Boolean(), False,
        "Records which ATen operators FlagGems replaced; see flaggems_log_path.", "1", compared=False,
    ),
    Field(
        "aten.log_path", "SGLANG_FLAGGEMS_LOG_PATH", "flaggems_log_path", PathText(), None,
        "File that flaggems_record writes.", "/tmp/gems_aten.txt", compared=False,
    ),
    Field(
        "aten.log_once", "SGLANG_FLAGGEMS_LOG_ONCE", "flaggems_log_once", Boolean(), True,
        "Records each ATen operator once; off: every call.", "0", compared=False,
    ),
    Field(
        "comm.backend", "SGLANG_FL_DIST_BACKEND", "comm.backend", choice_of(CommBackend), CommBackend.AUTO,
        "What carries collectives; auto is the first usable of flagcx, the vendor's library and torch. "
        "Wins over comm.flagcx_path of the same or a weaker source.", "flagcx",
    ),
    Field(
        "comm.mode", "SGLANG_FL_COMM_MODE", "comm.mode", choice_of(CommMode), CommMode.ALL,
        "all: every call goes through the selected backend; fastest: per call, the route of comm.routes.",
        "fastest",
    ),
    # Compared group by group, where they count.
    Field(
        "comm.routes", "SGLANG_FL_COMM_ROUTES", "comm.routes", CommRoutes(), (),
        "Under mode fastest, per operation the routes by size; native is SGLang's own method, and what no route "
        "fits goes through the selected backend.",
        "all_reduce=native:8388608@ordinary|flagcx;all_gather=torch:4096@eager", compared=False,
    ),
    Field(
        "comm.graph_mixing", "SGLANG_FL_COMM_GRAPH_MIXING", "comm.graph_mixing", choice_of(GraphMixing),
        GraphMixing.AUTO,
        "The order that NCCL keeps between CUDA graphs and other calls, which costs each captured call time; auto "
        "drops it where all ranks are on one host. A value of NCCL_GRAPH_MIXING_SUPPORT wins.", "keep",
    ),
    # One node may keep FlagCX in another place than the next; the backend that it implies is compared.
    Field(
        "comm.flagcx_path", "FLAGCX_PATH", "comm.flagcx_path", PathText(), None,
        "Where FlagCX is installed or built; set without comm.backend it selects flagcx.", "/opt/FlagCX",
        compared=False,
    ),
    Field(
        "comm.audit", "SGLANG_FL_COMM_AUDIT", "comm.audit", PathText(), None,
        "File that records what each group carried and what the hooks cost; other ranks write PATH.rankN.",
        "/tmp/comm_audit.json", compared=False,
    ),
    Field(
        "comm.timeout_s", "SGLANG_FL_COMM_TIMEOUT_S", "comm.timeout_s", Seconds(), None,
        "Seconds after which a communication that is not done fails; not set: SGLang's --dist-timeout, else 600.",
        "300",
    ),
    Field(
        "comm.create_timeout_s", "SGLANG_FL_COMM_CREATE_TIMEOUT_S", "comm.create_timeout_s", Seconds(), 120.0,
        "Seconds within which all ranks of a group must have created its communicator.", "60",
    ),
    Field(
        "comm.record", "SGLANG_FL_COMM_RECORD", "comm.record", Boolean(), True,
        "Records the last calls of each group and watches them; off: only the creation of groups is watched.", "0",
    ),
    # One node may have another disk than the next.
    Field(
        "comm.dump_dir", "SGLANG_FL_COMM_DUMP_DIR", "comm.dump_dir", PathText(), None,
        "Private folder for the dumps of recorded calls; not set: one of the user under the temporary directory.",
        "/tmp/comm_dumps", compared=False,
    ),
    Field(
        "system.config_file", "SGLANG_FL_CONFIG", None, PathText(), None,
        "The YAML file of settings.", "my_config.yaml", compared=False,
    ),
    # FlagCX joins different chips in one server, so ranks may differ here.
    Field(
        "system.platform", "SGLANG_FL_PLATFORM", "platform", choice_of_platforms(), None,
        "The platform whose defaults are used; not set: the one that is detected.", "cuda",
        compared=False, user_only=True,
    ),
    Field(
        "system.log_level", "SGLANG_FL_LOG_LEVEL", "log_level", choice_of(LogLevel), LogLevel.INFO,
        "The least severe messages of the plugin that are shown.", "DEBUG", compared=False,
    ),
    Field(
        "system.attention_backend", "ATTENTION_BACKEND", "attention_backend", Text(), None,
        "SGLang's attention backend where --attention-backend is absent.", "triton",
    ),
)  # fmt: skip

FIELD_BY_NAME = {field.name: field for field in FIELDS}
FIELD_BY_VARIABLE = {field.variable: field for field in FIELDS}
FIELD_BY_YAML_KEY = {field.yaml_key: field for field in FIELDS if field.yaml_key is not None}
YAML_SECTIONS = frozenset(key.partition(".")[0] for key in FIELD_BY_YAML_KEY if "." in key)
