"""The judgement of the soak: what grows is reported, what only jumps or wobbles is not."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable

import pytest

from tests.e2e.memory import Sample, judge, robust_slope, sample

LIMIT = 1024.0
KIB = 1024


def series(size: Callable[[int], float], descriptors: Callable[[int], int] = lambda _: 40) -> list[Sample]:
    """Samples each 25 requests from 500 to 2,000."""
    shared = (("/dev/shm/one (deleted)", 4096),)
    return [Sample(n, int(size(n)), descriptors(n), 10, shared) for n in range(500, 2001, 25)]


def noise(seed: int, spread: float) -> Callable[[int], float]:
    """Independent, some KiB up and down."""
    source = random.Random(seed)
    return lambda _: source.gauss(0, spread)


@pytest.mark.parametrize("seed", range(5))
def test_a_slope_is_found_under_noise_and_jumps(seed: int) -> None:
    """Given 1,500 bytes a request, noise of 64 KiB and one jump of 8 MiB, then the slope's interval holds it."""
    wobble = noise(seed, 64 * KIB)
    slope = robust_slope(series(lambda n: 1e8 + 1500 * n + wobble(n) + (8 * KIB**2 if n > 1990 else 0)))
    assert slope.low <= 1500 <= slope.high
    assert slope.high - slope.low < 200


@pytest.mark.parametrize("seed", range(5))
def test_a_process_that_only_wobbles_passes(seed: int) -> None:
    """Given noise and an allocator's step of 8 MiB towards the end, then there is no problem."""
    wobble = noise(seed, 64 * KIB)
    assert judge("x", series(lambda n: 1e8 + wobble(n) + (8 * KIB**2 if n > 1800 else 0)), LIMIT).problems == ()


def test_a_leak_of_two_kib_a_request_is_reported() -> None:
    """Given 2 KiB a request, then it is reported with slope, interval and what is allowed."""
    (problem,) = judge("scheduler", series(lambda n: 1e8 + 2048 * n), LIMIT).problems
    assert problem == "memory grows by 2048 bytes a request [2048, 2048], allowed: less than 1024"


def test_what_cannot_be_told_from_the_limit_is_a_miss() -> None:
    """Given a slope under the limit whose interval reaches over it, then it is reported."""
    wobble = noise(1, 2 * KIB**2)
    verdict = judge("x", series(lambda n: 1e8 + 900 * n + wobble(n)), LIMIT)
    assert verdict.slope.high > LIMIT and verdict.problems


def test_descriptors_and_shared_memory_must_be_constant() -> None:
    """Given one more descriptor, or another mapping of /dev/shm, from some request on, then each is reported."""
    (problem,) = judge("x", series(lambda _: 1e8, lambda n: 40 + (n > 1000)), LIMIT).problems
    assert problem == "descriptors are not constant: 40 to 41"
    samples = series(lambda _: 1e8)
    last = samples[-1]
    samples[-1] = Sample(last.requests, last.bytes, 40, 10, (*last.shared, ("/dev/shm/two", 8192)))
    (problem,) = judge("x", samples, LIMIT).problems
    assert problem.startswith("shared memory is not constant:") and "/dev/shm/two (8192 bytes)" in problem


def test_too_few_samples_are_an_error() -> None:
    """Given seven samples, then no slope is made up."""
    with pytest.raises(ValueError, match="7 samples are too few"):
        robust_slope(series(lambda _: 1e8)[:7])


def test_a_sample_sees_memory_descriptors_and_shared_memory() -> None:
    """Given this process, when it takes 32 MiB, a file and shared memory, then the next sample has them more."""
    from multiprocessing.shared_memory import SharedMemory

    before = sample(os.getpid(), 0)
    # Pages of its own: a heap may still hold that much of what was freed.
    kept = mmap.mmap(-1, 32 * KIB**2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept.write(b"x" * (32 * KIB**2))
    descriptor = os.open("/dev/null", os.O_RDONLY)
    shared = SharedMemory(create=True, size=4096)
    try:
        after = sample(os.getpid(), 1)
    finally:
        os.close(descriptor)
        shared.close()
        shared.unlink()
    assert 31 * KIB**2 < after.bytes - before.bytes < 64 * KIB**2, len(kept)
    assert after.descriptors >= before.descriptors + 1
    assert (f"/dev/shm/{shared.name}", 4096) in after.shared
