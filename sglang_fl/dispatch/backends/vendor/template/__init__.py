"""A template for a chip vendor's operators: copy this folder, rename it, and follow docs/adding_a_chip.md."""
