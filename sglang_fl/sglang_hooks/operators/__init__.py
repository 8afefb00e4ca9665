"""Layer 2 in SGLang: its fused operators run on what the policy selects; the rest keeps SGLang's own methods."""

from sglang_fl.sglang_hooks.operators.layer import (
    OperatorLayer,
    explain_operator,
    off_reason,
    operator_layer,
    unknown_names,
)

__all__ = ["OperatorLayer", "explain_operator", "off_reason", "operator_layer", "unknown_names"]
