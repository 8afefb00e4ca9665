"""The process of the sweep that touches the GPU: takes the cases one by one and writes each result at once.

``python -m sglang_fl.aten.sweep.worker JOBS RESULTS PARENT``: what ends this process, a fault of a kernel for example,
costs one case; the parent, whose process id is given, starts another for the rest. When it is gone, so is this one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from sglang_fl.aten.gems import Entry, Gems, load, replaced
from sglang_fl.aten.sweep.cases import PROBE, Case
from sglang_fl.aten.sweep.errors import compare
from sglang_fl.aten.sweep.inputs import Call
from sglang_fl.aten.sweep.results import Result
from sglang_fl.aten.sweep.timing import NOTHING_RUNS, UNTIMED, measure

BROKEN_DEVICE, WITHOUT_PARENT = 3, 4
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_Context = Callable[[], AbstractContextManager[None]]


def main(jobs_file: Path, results_file: Path) -> int:
    """Run every case of ``jobs_file``, JSON cases with their places; 3 if the device is lost to this process."""
    jobs = json.loads(jobs_file.read_text())
    gems = load()
    entries = {entry.key: entry for entry in gems.entries}
    device = torch.device(gems.device, torch.cuda.current_device())
    with results_file.open("a") as results:
        _write(results, {"ready": True, "version": gems.version, "card": torch.cuda.get_device_name()})
        for job in jobs:
            _write(results, {"begin": job["place"]})
            result = _run(Case(**job["case"]), entries, gems, device)
            _write(results, {"place": job["place"], "result": asdict(result)})
            if not _is_device_usable():
                return BROKEN_DEVICE
    return 0


def end_with(parent: int) -> None:
    """Let this process be killed when ``parent``, which started it, has ended, in whichever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(WITHOUT_PARENT)


def _write(results: TextIO, line: dict[str, Any]) -> None:
    results.write(json.dumps(line) + "\n")
    results.flush()


def _run(case: Case, entries: dict[str, Entry], gems: Gems, device: torch.device) -> Result:
    entry = entries[case.operator]
    context: _Context = partial(replaced, [entry], gems.dispatch_key)
    start = time.monotonic()
    try:
        call = Call(case, device)
        own = call.run()
    except Exception as error:  # noqa: BLE001 - third-party code; the reason is kept and reported
        return Result.failed(case, entry.name, f"PyTorch's own call cannot be made again: {_text(error)}", own=True)
    try:
        with context():
            other = call.run()
        torch.cuda.synchronize()
        first_s = time.monotonic() - start
        errors = compare(call, own, other)
        is_empty = all(tensor.numel() == 0 for tensor in own)
        del own, other
        if set(case.phases) == {PROBE}:
            times = UNTIMED
        else:
            times = NOTHING_RUNS if is_empty else measure(call.repeat(), context)
    except Exception as error:  # noqa: BLE001 - third-party code; the reason is kept and reported
        return Result.failed(case, entry.name, f"raised {_text(error)}")
    return Result.of(case, entry.name, errors, times, first_s)


def _text(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}"


def _is_device_usable() -> bool:
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item() == 1)
    except RuntimeError:
        return False


if __name__ == "__main__":
    end_with(int(sys.argv[3]))
    # As SGLang runs its models.
    with torch.inference_mode():
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
