"""One rank of four on two hosts: what FlagCX's route becomes across them, and on each of them alone; one JSON line."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from sglang_fl.comm import CommunicatorFL
from sglang_fl.comm.errors import AgreementError
from sglang_fl.config import load_settings

STRICT = "SGLANG_FL_STRICT"


def choose(ranks: list[int], strict: str) -> dict[str, object] | None:
    """The backend, why others were passed over and a sum, or the error; None on ranks outside the group."""
    cpu_group, device_group = (dist.new_group(ranks, backend="gloo") for _ in range(2))
    if dist.get_rank() not in ranks:
        return None
    settings = load_settings({**os.environ, STRICT: strict})
    try:
        communicator = CommunicatorFL(
            cpu_group=cpu_group, device_group=device_group, device="cpu", ranks=ranks, name="test", settings=settings
        )
    except AgreementError as error:
        return {"error": str(error)}
    reasons = {entry.impl_id: entry.reason for entry in communicator.agreed.passed_over}
    total = communicator.all_reduce(torch.full((3,), float(dist.get_rank()))).tolist()
    communicator.destroy()
    return {"backend": communicator.backend, "reasons": reasons, "sum": total}


def main() -> None:
    """Join the others, choose for each group in turn, tell."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    chosen = {
        "across": choose([0, 1, 2, 3], "0"),
        "across, strict": choose([0, 1, 2, 3], "1"),
        "first host": choose([0, 1], "1"),
        "second host": choose([2, 3], "1"),
    }
    dist.barrier()
    dist.destroy_process_group()
    json.dump(chosen, sys.stdout)


if __name__ == "__main__":
    main()
