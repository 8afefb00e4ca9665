"""Registers NCCL, which inside SGLang means its own methods, and the routes over symmetric memory."""

from sglang_fl.comm.backends.torch_dist import TorchBackend
from sglang_fl.comm.backends.vendor.cuda.pull import PullBackend
from sglang_fl.comm.backends.vendor.cuda.push import PushBackend
from sglang_fl.comm.backends.vendor.cuda.symmetric import OneShotTransport, SymmetricBackend, TwoShotTransport
from sglang_fl.comm.types import BackendRegistry
from sglang_fl.selection import Kind


def register_comm(registry: BackendRegistry) -> None:
    """Entry point of this folder."""
    registry.register(TorchBackend("nccl", Kind.VENDOR, vendor="nvidia", c10d_backend="nccl"))
    registry.register(PushBackend("symm_push"))
    registry.register(PullBackend("symm_pull"))
    registry.register(SymmetricBackend("symm_one_shot", OneShotTransport))
    registry.register(SymmetricBackend("symm_two_shot", TwoShotTransport))
