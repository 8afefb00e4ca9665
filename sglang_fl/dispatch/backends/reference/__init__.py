"""The reference backend: every operator in plain PyTorch, on any device."""
