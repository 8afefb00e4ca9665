"""A process that ends while a call of it is not done: at once, quiet, and with the exit code it would have had."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ENDS = """
import os, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from sglang_fl.comm import CommunicatorFL
from sglang_fl.comm.errors import CommError
_CODES = {{"return": 0, "exit": 5}}
rank, call, end, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
store = dist.FileStore(str(folder / "store"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
world = dist.group.WORLD
group = CommunicatorFL(
    cpu_group=world, device_group=world, device="cpu", ranks=[0, 1], name="tp:0", operation_timeout_s={limit}
)
group.all_reduce(torch.ones(1))
calls = {{
    "all_reduce": lambda: group.all_reduce(torch.ones(4)),
    "barrier": group.barrier,
    "recv": lambda: group.recv(torch.Size([4]), torch.float32, 1),
}}
if rank == 1:
    sys.stdin.readline()  # until the other one has ended
    os._exit(0)
if {limit} < 60:
    try:
        calls[call]()
    except CommError as error:
        print("refused", flush=True)
        group.destroy()
        if end == "raise":
            raise
    sys.exit(_CODES[end])
inside = threading.Thread(target=calls[call], daemon=True)
inside.start()
until_s = time.monotonic() + 30
while not sys._current_frames()[inside.ident].f_code.co_filename.endswith("torch_dist/waiting.py"):
    assert time.monotonic() < until_s
    time.sleep(0.01)
print("inside", flush=True)
if end == "exit":
    sys.exit(5)
if end == "raise":
    raise KeyError("planted")
"""
_LEAVES = """
import os, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from sglang_fl.comm import CommunicatorFL
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.monitor import MONITOR

class Planted(RuntimeError):
    pass

def exits(number, frame):
    sys.exit(5)

def raises(number, frame):
    raise Planted("by the handler")

rank, call, by, end, folder = int(sys.argv[1]), *sys.argv[2:5], Path(sys.argv[5])
handlers = {{"interrupt": signal.default_int_handler, "exit": exits, "error": raises}}
signal.signal(signal.SIGINT, handlers[by])  # also where whoever started this ignores it, as a shell's "&" does
store = dist.FileStore(str(folder / "store"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = CommunicatorFL(
    cpu_group=dist.new_group([0, 1]), device_group=dist.new_group([0, 1]), device="cpu", ranks=[0, 1], name="tp:0",
    operation_timeout_s=600,
)
group.all_reduce(torch.ones(1))
calls = {{
    "all_reduce": lambda: group.all_reduce(torch.ones(4)),
    "broadcast": lambda: group.broadcast(torch.ones(4), src=1),
    "barrier": group.barrier,
    "objects": lambda: group.broadcast_object_list([1], src=1),
}}
if rank == 1:
    until_s = time.monotonic() + 60
    while not MONITOR.has_concluded:  # else the call that the other one has begun may still come to its end
        assert time.monotonic() < until_s
        time.sleep(0.01)
    try:
        calls[call]()
    except CommError as error:
        print(error, flush=True)
    sys.stdin.readline()  # until the other one has ended
    os._exit(0)

def send():
    until_s = time.monotonic() + 30
    while True:
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None and not frame.f_code.co_filename.endswith("torch_dist/waiting.py"):
            frame = frame.f_back
        if frame is not None and time.monotonic() > until_s - 29:
            break
        assert time.monotonic() < until_s
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=send, daemon=True).start()
try:
    calls[call]()
except BaseException as error:
    print(type(error).__name__, flush=True)
    try:
        calls[call]()
    except CommError as refusal:
        print(refusal, flush=True)
    sys.stdin.readline()
    if end == "destroy":
        group.destroy()
        dist.destroy_process_group()
    raise
"""
_TORCH = {"SGLANG_FL_DIST_BACKEND": "torch", "FLAGCX_PATH": ""}
_CODES = {"return": 0, "exit": 5, "raise": 1}


@pytest.mark.parametrize(
    ("call", "end"),
    [("all_reduce", "return"), ("all_reduce", "exit"), ("all_reduce", "raise"), ("barrier", "exit"), ("recv", "exit")],
)
def test_a_daemon_thread_inside_a_call_does_not_abort_the_process(call: str, end: str, tmp_path: Path) -> None:
    """Given a daemon thread in a call whose peer never comes, when the main thread returns, exits with a code or
    raises, then the process ends with the code of that, and C++ does not end it."""
    (code, output, errors), _ = run(call, end, 600.0, tmp_path)
    assert (code, output) == (_CODES[end], "inside\n"), errors
    assert "terminate called" not in errors
    assert ("KeyError: 'planted'" in errors) is (end == "raise")


@pytest.mark.parametrize(
    ("call", "end"), [("all_reduce", "return"), ("all_reduce", "exit"), ("all_reduce", "raise"), ("barrier", "exit")]
)
def test_a_call_that_was_given_up_does_not_hold_the_process(call: str, end: str, tmp_path: Path) -> None:
    """Given a call that did not complete within its limit, when the process ends, then with its own code, though gloo
    is still in that call, for half an hour by its own limit."""
    (code, output, errors), _ = run(call, end, 2.0, tmp_path)
    assert (code, output) == (_CODES[end], "refused\n"), errors
    assert ("CollectiveTimeout: " in errors) is (end == "raise")


@pytest.mark.parametrize(
    ("call", "by", "end"),
    [
        ("all_reduce", "interrupt", "leave"),
        ("all_reduce", "exit", "destroy"),
        ("broadcast", "error", "leave"),
        ("barrier", "exit", "leave"),
        ("objects", "interrupt", "destroy"),
    ],
)
def test_a_call_that_a_signal_ends_does_not_hold_the_process(call: str, by: str, end: str, tmp_path: Path) -> None:
    """Given a call whose peer is alive and late, when a signal's handler raises in it, then the group is refused on
    both ranks with the name of the one that left, and that one ends with its own code, though gloo is still in the call
    by its own limit of half an hour."""
    name, code = {"interrupt": ("KeyboardInterrupt", -2), "exit": ("SystemExit", 5), "error": ("Planted", 1)}[by]
    first, second = start(_LEAVES.format(), (call, by, end), tmp_path)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == f"{name}\n"
        refusal = first.stdout.readline()
        _, errors = first.communicate("\n", timeout=90)
        said, words = second.communicate("\n", timeout=90)
    finally:
        stop([first, second])
    who = (
        rf"cannot complete: global rank 0 \(process {first.pid} on \S+\) has left the call, which was under way: {name}"
    )
    assert re.search(who, refusal), refusal
    assert re.search(who + r" \(found by global rank 0\)", said), said + words
    assert (first.returncode, second.returncode) == (code, 0), errors
    assert ("Planted: by the handler" in errors) is (by == "error")


def run(call: str, end: str, limit_s: float, folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of both ranks; the first must end long before gloo's limit."""
    ranks = start(_ENDS.format(limit=limit_s), (call, end), folder)
    try:
        first = ranks[0].communicate(timeout=90)
        second = ranks[1].communicate("\n", timeout=90)
    finally:
        stop(ranks)
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, (first, second), strict=True)]


def start(program: str, arguments: tuple[str, ...], folder: Path) -> list[subprocess.Popen[str]]:
    """Two ranks of ``program``."""
    environment = {**os.environ, **_TORCH, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    environment["SGLANG_FL_COMM_DUMP_DIR"] = str(folder / "dumps")
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), *arguments, str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def stop(ranks: list[subprocess.Popen[str]]) -> None:
    """Whatever is left of them."""
    for rank in ranks:
        rank.kill()
        rank.wait()
