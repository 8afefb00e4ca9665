"""Layer 1: FlagGems' kernels in the place of PyTorch's own operators, and the sweep that finds which of them serve."""
