"""FlagOS' operators: the Triton kernels of FlagGems, called without FlagGems' Python layers around them."""
