"""The base class that a backend's own class derives from; each folder beside this file is one backend."""

from sglang_fl.dispatch.ops import FLBackendBase


class Backend(FLBackendBase):
    """A backend: a name, whether it is available, and the operators that it offers."""


__all__ = ["Backend"]
