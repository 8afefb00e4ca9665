"""The cffi build of the extension ``sglang_fl._flagcx``; used while the package is built, never installed."""
