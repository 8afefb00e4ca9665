"""From settings to the order of communication backends: one policy for operators and for collectives."""

from __future__ import annotations

import pytest

from sglang_fl.comm.policy import communicator_order, communicator_policy, describe_order, puts_first
from sglang_fl.config import Settings, load_settings
from sglang_fl.selection import Kind

PREFER = "SGLANG_FL_PREFER"
PER_OP = "SGLANG_FL_PER_OP"
BACKEND = "SGLANG_FL_DIST_BACKEND"
KINDS = ("flagos", "vendor", "reference")


def _settings(platform: str | None = None, **variables: str) -> Settings:
    return load_settings(variables, platform)


@pytest.mark.parametrize(
    ("variables", "order"),
    [
        ({}, KINDS),
        ({BACKEND: "auto"}, KINDS),
        ({BACKEND: "auto", PREFER: "vendor"}, ("vendor", "flagos", "reference")),
        ({BACKEND: "auto", PREFER: "reference"}, ("reference", "flagos", "vendor")),
        ({BACKEND: "flagcx"}, ("flagcx", "vendor", "reference")),
        ({BACKEND: "flagcx", PREFER: "reference"}, ("flagcx", "vendor", "reference")),
        ({"FLAGCX_PATH": "/opt/FlagCX"}, ("flagcx", "vendor", "reference")),
        ({"FLAGCX_PATH": "/opt/FlagCX", BACKEND: "torch"}, ("torch",)),
        ({BACKEND: "nccl"}, ("nccl", "reference")),
        ({BACKEND: "hccl"}, ("hccl", "reference")),
        ({BACKEND: "torch"}, ("torch",)),
        ({PER_OP: "communicator=vendor:Acme|reference"}, ("vendor:acme", "reference")),
        ({PER_OP: "communicator=vendor:acme", BACKEND: "torch"}, ("vendor:acme",)),
        ({PER_OP: "communicator=flagos", PREFER: "vendor"}, ("flagos",)),
        ({PER_OP: "rms_norm=vendor"}, KINDS),
    ],
)
def test_the_order(variables: dict[str, str], order: tuple[str, ...]) -> None:
    """Given settings, then the order is the one for `communicator`, else the backend's, and under auto the kinds'."""
    settings = _settings(**variables)
    assert communicator_order(settings) == order
    assert communicator_policy(settings).tokens("communicator") == order


@pytest.mark.parametrize(("platform", "order"), [("cuda", ("nccl", "reference")), ("cpu", ("torch",))])
def test_a_platforms_default_yields_to_the_users_order(platform: str, order: tuple[str, ...]) -> None:
    """Given a platform whose own default names a backend, then an order for `communicator` still wins over it."""
    assert communicator_order(_settings(platform)) == order
    assert communicator_order(_settings(platform, **{PER_OP: "communicator=flagos|vendor"})) == ("flagos", "vendor")


def test_vendor_rules_and_strict_mode_are_those_of_the_operators() -> None:
    """Given the operators' vendor lists and strict mode, then the policy has them, by canonical names."""
    policy = communicator_policy(
        _settings(
            SGLANG_FL_DENY_VENDORS="cuda",
            SGLANG_FL_ALLOW_VENDORS="npu,ACME",
            SGLANG_FL_STRICT="1",
            **{PREFER: "vendor"},
        )
    )
    assert policy.deny_vendors == {"nvidia"}
    assert policy.allow_vendors == {"ascend", "acme"}
    assert policy.strict
    assert policy.prefer is Kind.VENDOR
    assert communicator_policy(_settings()).allow_vendors is None


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "auto (from default)"),
        ({BACKEND: "torch"}, "torch (from SGLANG_FL_DIST_BACKEND)"),
        ({"FLAGCX_PATH": "/x"}, "flagcx (from FLAGCX_PATH)"),
        (
            {PER_OP: "communicator=vendor:acme|reference"},
            "vendor:acme|reference (from communicator in SGLANG_FL_PER_OP)",
        ),
        (
            {PER_OP: "communicator=flagos", BACKEND: "torch"},
            "flagos (from communicator in SGLANG_FL_PER_OP), which wins over torch (from SGLANG_FL_DIST_BACKEND)",
        ),
    ],
)
def test_a_report_says_what_is_asked_for_and_by_what(variables: dict[str, str], text: str) -> None:
    """Given settings, then one line has the order, its source, and what it wins over."""
    assert describe_order(_settings(**variables)) == text


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),  # the platform's default
        ({BACKEND: "nccl"}, True),
        ({PER_OP: "communicator=vendor:cuda|reference"}, True),
        ({PER_OP: "communicator=vendor:cuda", BACKEND: "torch"}, True),
        ({PER_OP: "communicator=flagos|vendor:nvidia"}, False),
        ({BACKEND: "auto"}, False),
        ({BACKEND: "torch"}, False),
        ({"FLAGCX_PATH": "/opt/FlagCX"}, False),
        ({"SGLANG_FL_DENY_VENDORS": "nvidia"}, False),
        ({"SGLANG_FL_ALLOW_VENDORS": "ascend"}, False),
        ({"SGLANG_FL_ALLOW_VENDORS": "cuda"}, True),
    ],
)
def test_whether_the_vendors_own_comes_first(variables: dict[str, str], is_first: bool) -> None:
    """Given NVIDIA and settings, then nothing needs a hook only where NCCL is asked for by name and allowed."""
    assert puts_first(_settings("cuda", **variables), "nccl", "nvidia") is is_first
