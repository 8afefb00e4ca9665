"""Layer 2: fused operators, each bound to the implementation that the policy selects."""

from sglang_fl.dispatch.explanation import explain
from sglang_fl.dispatch.manager import (
    Bound,
    OpManager,
    UnknownOperatorError,
    call_op,
    get_manager,
    resolve_op,
    set_manager,
)
from sglang_fl.dispatch.policy import SelectionPolicy, configure, current_policy, policy_context
from sglang_fl.dispatch.registry import OpRegistry, RegistrationError
from sglang_fl.dispatch.types import BackendImplKind, BackendPriority, NotSupportedError, OpImpl, OwnMethodError

__all__ = [
    "BackendImplKind",
    "BackendPriority",
    "Bound",
    "NotSupportedError",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "OwnMethodError",
    "RegistrationError",
    "SelectionPolicy",
    "UnknownOperatorError",
    "call_op",
    "configure",
    "current_policy",
    "explain",
    "get_manager",
    "policy_context",
    "resolve_op",
    "set_manager",
]
