"""Layer 2: fused operators, each bound to the implementation that the policy selects."""
