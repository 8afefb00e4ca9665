"""The reference operators, one file per family."""
