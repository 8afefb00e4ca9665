"""What the benchmark of the collectives' routes consists of: the ranks, the routes side by side, the figures."""
