"""The sweep: every operator that FlagGems replaces, on recorded inputs, against PyTorch's own: error and time."""
