"""The backend's class, as the recipe has it."""

from sglang_fl.dispatch.backends import Backend


class MyChipBackend(Backend):
    """The recipe's class."""

    _available = None

    @property
    def name(self) -> str:
        """Name."""
        return "my_chip"

    def is_available(self) -> bool:
        """Whether the chip is there."""
        if MyChipBackend._available is None:
            try:
                import my_chip_sdk

                MyChipBackend._available = my_chip_sdk.device_count() > 0
            except ImportError:
                MyChipBackend._available = False
        return MyChipBackend._available

    def silu_and_mul(self, obj, x):
        """The recipe imports in the method."""
        from .impl.activation import silu_and_mul_my_chip

        return silu_and_mul_my_chip(obj, x)

    def rms_norm(self, obj, x, residual=None):
        """Likewise."""
        from .impl.normalization import rms_norm_my_chip

        return rms_norm_my_chip(obj, x, residual)

    def rotary_embedding(self, obj, query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
        """Likewise."""
        from .impl.rotary import rotary_embedding_my_chip

        return rotary_embedding_my_chip(obj, query, key, cos, sin, position_ids, rotary_interleaved, inplace)
