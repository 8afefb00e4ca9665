"""A template for a chip vendor's own collectives: copy this folder, rename it, and follow docs/adding_a_chip.md."""
