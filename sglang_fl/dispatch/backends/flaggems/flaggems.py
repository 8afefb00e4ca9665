"""The backend's class: FlagGems' name, its availability, and the operators that it offers."""

from __future__ import annotations

from sglang_fl.dispatch.backends import Backend
from sglang_fl.dispatch.backends.flaggems.availability import flag_gems_availability
from sglang_fl.dispatch.backends.flaggems.impl.activation import gelu_and_mul_flaggems, silu_and_mul_flaggems
from sglang_fl.dispatch.backends.flaggems.impl.normalization import gemma_rms_norm_flaggems, rms_norm_flaggems
from sglang_fl.dispatch.backends.flaggems.impl.rotary import rotary_embedding_flaggems
from sglang_fl.dispatch.backends.flaggems.impl.topk import topk_flaggems


class FlagGemsBackend(Backend):
    """FlagGems, and the kernels beside it. An operator is the function itself, so that a call has no method between."""

    @property
    def name(self) -> str:
        """``flaggems``."""
        return "flaggems"

    def is_available(self) -> bool:
        """Whether FlagGems can be used in this process; the reason is ``flag_gems_availability()``'s."""
        return flag_gems_availability().available

    silu_and_mul = staticmethod(silu_and_mul_flaggems)
    gelu_and_mul = staticmethod(gelu_and_mul_flaggems)
    rms_norm = staticmethod(rms_norm_flaggems)
    gemma_rms_norm = staticmethod(gemma_rms_norm_flaggems)
    rotary_embedding = staticmethod(rotary_embedding_flaggems)
    topk = staticmethod(topk_flaggems)
