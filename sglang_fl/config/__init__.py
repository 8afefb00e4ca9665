"""Settings of the plugin: one table of fields, read once from environment, YAML and platform defaults."""

from sglang_fl.config.chips import CHIPS, Chip, canonical_vendor, find_chip
from sglang_fl.config.fields import FIELDS, SECTIONS, Field
from sglang_fl.config.loader import CONFIG_DIR as _CONFIG_DIR
from sglang_fl.config.loader import load_settings
from sglang_fl.config.problems import Problem, SettingsError, closest
from sglang_fl.config.settings import (
    AtenSettings,
    CommSettings,
    OpsSettings,
    SettingRow,
    Settings,
    SystemSettings,
)
from sglang_fl.config.sources import Source, SourceKind
from sglang_fl.config.value_types import without_namespace
from sglang_fl.config.values import (
    AtenProfile,
    BackendKind,
    CaptureRule,
    CommBackend,
    CommMode,
    CommRoute,
    CommRouteOrder,
    LogLevel,
    MemoryRule,
    OpBackend,
    OpOrder,
    RankRule,
)

__all__ = [
    "CHIPS",
    "FIELDS",
    "SECTIONS",
    "_CONFIG_DIR",
    "AtenProfile",
    "AtenSettings",
    "BackendKind",
    "CaptureRule",
    "Chip",
    "CommBackend",
    "CommMode",
    "CommRoute",
    "CommRouteOrder",
    "CommSettings",
    "Field",
    "LogLevel",
    "MemoryRule",
    "OpBackend",
    "OpOrder",
    "OpsSettings",
    "Problem",
    "RankRule",
    "SettingRow",
    "Settings",
    "SettingsError",
    "Source",
    "SourceKind",
    "SystemSettings",
    "canonical_vendor",
    "closest",
    "find_chip",
    "load_settings",
    "without_namespace",
]
