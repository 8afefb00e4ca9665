"""The extension that native_bindings builds: cffi's two objects. Its functions: native_bindings/declarations."""

from typing import Any

ffi: Any
lib: Any
