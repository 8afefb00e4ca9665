"""The randomised test, and its command to repeat a seed: python -m tests.distributed.random_calls --seed N."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from sglang_fl.testing.ranks import RankContext, RanksFailed, run_ranks
from tests.distributed.groups import group_of
from tests.distributed.random_data import Data
from tests.distributed.random_operations import OPERATIONS, Call

ROOT = Path(__file__).parents[2]
HOSTCX = ROOT / "build/hostcx"
FULL_CALLS = 10_000
LEAST_CALLS = 200  # of each operation in a full run
BACKENDS = ("torch", "flagcx")
WORLD_SIZES = (2, 3, 4)

# The groups that the calls are drawn among: in order, in another order, and some of the ranks.
GROUPS: dict[int, tuple[list[int], ...]] = {
    2: ([0, 1], [1, 0]),
    3: ([0, 1, 2], [2, 0, 1], [2, 1]),
    4: ([0, 1, 2, 3], [2, 0, 3, 1], [3, 1, 2], [0, 2]),
}


def call_all(context: RankContext, seed: int, first: int, calls: int, data: Data) -> Counter[str]:
    """Make the calls ``first`` to ``first + calls - 1`` of a seed; how often each operation was drawn.

    A call depends on the seed and its number alone, so that any range of them can be repeated.
    """
    communicators = [group_of(ranks, context, timeout_s=60.0) for ranks in GROUPS[context.world_size]]
    drawn: Counter[str] = Counter()
    for number in range(first, first + calls):
        rng = random.Random(seed * 1_000_003 + number)
        operation, communicator = rng.choice(OPERATIONS), rng.choice(communicators)
        drawn[operation.name] += 1
        if communicator is None:
            continue
        context.note(f"seed {seed}, call {number}: {operation.name} in {communicator!r}")
        operation.run(Call(communicator, rng, data, number))
    for communicator in communicators:
        if communicator is not None:
            communicator.destroy()
    return drawn


def run(seed: int, ranks: int, backend: str, calls: int, first: int = 0) -> Counter[str]:
    """Run a range of a seed's calls in processes; how often each operation was drawn.

    Raises:
        RanksFailed: with the seed, the number of the failing call and the command that repeats it.
    """
    environment = {"SGLANG_FL_DIST_BACKEND": backend, "FLAGCX_PATH": str(HOSTCX), "HOSTCX_QUIET": "1"}
    data = Data.of_seed(seed)
    limit_s = 120.0 + 0.05 * calls * ranks
    try:
        results = run_ranks(call_all, ranks, seed, first, calls, data, env=environment, timeout_s=limit_s)
    except RanksFailed:
        print(
            f"To repeat: python -m tests.distributed.random_calls --seed {seed} --ranks {ranks} --backend {backend} "
            f"--first {first} --calls {calls}; for one call alone, --first ITS_NUMBER --calls 1",
            file=sys.stderr,
        )
        raise
    assert all(result == results[0] for result in results)
    found: Counter[str] = results[0]
    return found


def least(calls: int) -> int:
    """How often each operation must have been drawn among so many calls."""
    return LEAST_CALLS * calls // FULL_CALLS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.random_calls", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="left out: a new one, which is printed")
    parser.add_argument("--ranks", type=int, choices=WORLD_SIZES, action="append", help="left out: 2, 3 and 4")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="left out: both")
    parser.add_argument("--calls", type=int, default=FULL_CALLS, help=f"left out: {FULL_CALLS}")
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    return parser.parse_args()


def main() -> int:
    """Run what the command line asks for; 1 if a call was wrong or an operation came too rarely."""
    arguments = _arguments()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    subprocess.run(
        ["make", "-s", "-C", str(ROOT / "csrc/hostcx"), f"OUT={HOSTCX}"], check=True, stdout=subprocess.DEVNULL
    )
    for backend in arguments.backend or BACKENDS:
        for ranks in arguments.ranks or WORLD_SIZES:
            print(f"{backend}, {ranks} ranks, seed {seed}: {arguments.calls} calls ...", flush=True)
            start_s = time.monotonic()
            try:
                drawn = run(seed, ranks, backend, arguments.calls, arguments.first)
            except RanksFailed as error:
                print(error, file=sys.stderr)
                return 1
            rarest = min(drawn[operation.name] for operation in OPERATIONS)
            print(
                f"  all right in {time.monotonic() - start_s:.0f} s; each operation at least {rarest} times", flush=True
            )
            if arguments.calls >= FULL_CALLS and rarest < least(arguments.calls):
                print(f"an operation was drawn {rarest} times, fewer than {least(arguments.calls)}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
