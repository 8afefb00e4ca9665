"""The operators of a chip; to add one, copy this folder, rename it, and follow docs/adding_a_chip.md."""
