"""Memory that notices when a library writes outside of what it was given, and the comparison of results."""

from __future__ import annotations

import ctypes

import torch

_GUARD_BYTES = 64
_GUARD = 0xEE
_STALE = 0xA5

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two contiguous byte tensors of one device are equal."""
    if left.numel() != right.numel():
        return False
    if left.device.type != "cpu":
        return torch.equal(left, right)
    return _memcmp(left.data_ptr(), right.data_ptr(), left.numel()) == 0


class GuardedBuffer:
    """A byte buffer whose parts are handed out between two guards, at any alignment."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._raw = torch.empty(capacity + 4 * _GUARD_BYTES, dtype=torch.uint8, device=device)
        self._before = self._after = self._raw[:0]

    def take(self, size: int, shift: int = 0) -> torch.Tensor:
        """``size`` bytes that start ``shift`` (at most 64) bytes after an aligned address, filled with 0xa5."""
        start = 2 * _GUARD_BYTES + shift
        self._before = self._raw[start - _GUARD_BYTES : start]
        self._after = self._raw[start + size : start + size + _GUARD_BYTES]
        self._before.fill_(_GUARD)
        self._after.fill_(_GUARD)
        return self._raw[start : start + size].fill_(_STALE)

    def damage(self) -> str | None:
        """Say which of the two guards of the part in use was written over, and mend it."""
        for name, guard in (("before", self._before), ("after", self._after)):
            if not bool((guard == _GUARD).all()):
                guard.fill_(_GUARD)
                return f"wrote {name} the buffer"
        return None


def is_stale(part: torch.Tensor) -> bool:
    """Whether nothing was written into a part since it was taken."""
    return bool((part == _STALE).all())


def difference(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, tolerance: float) -> str | None:
    """Describe the first element that differs; ``tolerance`` is relative, 0 asks for the same bytes."""
    if same_bytes(got, expected):
        return None
    got_typed, expected_typed = (part.cpu().clone().view(dtype) for part in (got, expected))
    if tolerance:
        deviation = (got_typed.double() - expected_typed.double()).abs()
        wrong = deviation > tolerance * expected_typed.double().abs()
    else:
        wrong = (got != expected).view(-1, dtype.itemsize).any(dim=1).cpu()
    if not bool(wrong.any()):
        return None
    first = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {len(wrong)} elements are wrong, the first at {first}: "
        f"got {got_typed[first].item()}, expected {expected_typed[first].item()}"
    )
