"""The operators, one file per family; each function has the standard signature of ``sglang_fl.dispatch.ops``."""
