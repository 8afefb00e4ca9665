"""How much memory is in use where a group's tensors live, to tell what a group's transport took."""

from __future__ import annotations

from pathlib import Path

import torch


def memory_in_use(device: torch.device) -> int:
    """Bytes: of an accelerator what its runtime counts as taken, by any process; of a host, shared memory of this one.

    Of the host only shared memory counts, since that is what transports between processes take. Source: RssShmem in
    proc(5), ``mem_get_info`` of torch's device modules. 0 where neither tells.
    """
    if device.type == "cpu":
        return _resident_shared_memory()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return 0
    free, total = module.mem_get_info(device)
    return int(total - free)


def _resident_shared_memory() -> int:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0


def in_words(size: int) -> str:
    """``size`` bytes in KiB, or from 1 MiB on in MiB with one decimal."""
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"
