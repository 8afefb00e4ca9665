"""What a process holds, sampled from /proc, and the robust slope of its growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

# Pages of files are shared with every other process of the machine that maps the same library: their share changes
# when those come and go, and they are no leak.
_COUNTED = ("Pss_Anon", "Pss_Shmem", "SwapPss")
_QUANTILE = 1.96  # of the normal distribution, for 95 %


@dataclass(frozen=True)
class Sample:
    """One process at one moment.

    Attributes:
        requests: that the server had answered.
        bytes: anonymous and shared memory in proportion (Pss) and what is swapped out; no pages of files.
        descriptors: open files, sockets, pipes.
        threads: of the process.
        shared: name and size of each mapping of /dev/shm, in bytes.
    """

    requests: int
    bytes: int
    descriptors: int
    threads: int
    shared: tuple[tuple[str, int], ...]


def sample(pid: int, requests: int, proc: Path = Path("/proc")) -> Sample:
    """The process now.

    Raises:
        OSError: it is gone, or another user's.
    """
    folder = proc / str(pid)
    rollup = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
    kib = sum(int(rollup[name].split()[0]) for name in _COUNTED)
    return Sample(
        requests,
        kib * 1024,
        len(list((folder / "fd").iterdir())),
        len(list((folder / "task").iterdir())),
        tuple(sorted(_shared((folder / "maps").read_text()).items())),
    )


def _shared(maps: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for line in maps.splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) < 6 or not parts[5].startswith("/dev/shm/"):
            continue
        begin, end = (int(number, 16) for number in parts[0].split("-"))
        sizes[parts[5]] = sizes.get(parts[5], 0) + end - begin
    return sizes


@dataclass(frozen=True)
class Slope:
    """Bytes a request: the median of the slopes between all pairs of samples, and its interval of 95 %.

    Theil and Sen's: a few jumps, as an allocator makes, move it little. The interval is Sen's, from Kendall's
    statistic; it takes the samples for independent.
    """

    per_request: float
    low: float
    high: float


def robust_slope(samples: Sequence[Sample]) -> Slope:
    """Of at least eight samples.

    Raises:
        ValueError: there are fewer, or two at the same number of requests.
    """
    if len(samples) < 8:
        raise ValueError(f"{len(samples)} samples are too few for a slope, 8 are needed: sample more often")
    if len({one.requests for one in samples}) < len(samples):
        raise ValueError("two samples at the same number of requests")
    slopes = sorted((b.bytes - a.bytes) / (b.requests - a.requests) for a, b in combinations(samples, 2))
    n, count = len(samples), len(slopes)
    spread = _QUANTILE * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, math.floor((count - spread) / 2) - 1)
    high = min(count - 1, math.ceil((count + spread) / 2))
    middle = count // 2
    median = slopes[middle] if count % 2 else (slopes[middle - 1] + slopes[middle]) / 2
    return Slope(median, slopes[low], slopes[high])


@dataclass(frozen=True)
class Verdict:
    """One process over the samples that count; ``problems`` is empty where all is as it must be."""

    process: str
    slope: Slope
    first: Sample
    last: Sample
    problems: tuple[str, ...]


def judge(process: str, samples: Sequence[Sample], limit_per_request: float) -> Verdict:
    """Growth of memory under the limit, with its whole interval; descriptors and shared memory constant."""
    slope = robust_slope(samples)
    problems = []
    if slope.high >= limit_per_request:
        problems.append(
            f"memory grows by {slope.per_request:.0f} bytes a request [{slope.low:.0f}, {slope.high:.0f}], "
            f"allowed: less than {limit_per_request:.0f}"
        )
    descriptors = {one.descriptors for one in samples}
    if len(descriptors) > 1:
        problems.append(f"descriptors are not constant: {min(descriptors)} to {max(descriptors)}")
    shared = {one.shared for one in samples}
    if len(shared) > 1:
        names = sorted({f"{name} ({size} bytes)" for one in shared for name, size in one})
        problems.append(f"shared memory is not constant: {', '.join(names)}")
    return Verdict(process, slope, samples[0], samples[-1], tuple(problems))
