"""Runs the documents' commands as they stand: a page in order, in a fresh folder, on a host without an accelerator."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from sglang_fl.config.fields import FIELD_BY_VARIABLE
from sglang_fl.testing.server import free_port
from tests.documents import ROOT, RUNS, Block, blocks, output_pattern

LIMIT_S = 600.0  # against a hang
PORT = "30000"  # of the documents; another one is free for sure
_DONE = "== end of block"


def environment() -> dict[str, str]:
    """A new user's: no settings, the interpreter that is to be used, the checkout that the documents name."""
    left_out = {*FIELD_BY_VARIABLE, "PYTHONDONTWRITEBYTECODE"}
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SGLANG_") and name not in left_out}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {"PATH": path, "CHECKOUT": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160"}
    return {**kept, **given, "no_proxy": "127.0.0.1"}


def script(programs: list[Block]) -> str:
    """One bash script of all blocks, which says after each that it is done and ends with the first that fails."""
    parts = ["set -euo pipefail"]
    for number, block in enumerate(programs):
        text = block.text
        if block.language == "python":
            text = f"cat > block_{number}.py <<'END_OF_BLOCK'\n{text}END_OF_BLOCK\npython block_{number}.py\n"
        parts.append(f"{text}echo; echo '{_DONE} {number}'")
    return "\n".join(parts).replace(PORT, str(free_port()))


def in_session(session: int) -> Iterator[psutil.Process]:
    """The processes that a page has started and not ended."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue


def run(text: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a script; no process of it is left, and it fails if one was."""
    output = folder.parent / f"{folder.name}.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", text],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        finally:
            _, left = psutil.wait_procs(list(in_session(process.pid)), timeout=5)
            for one in left:
                one.send_signal(signal.SIGKILL)
            psutil.wait_procs(left, timeout=5)
    assert left == [], f"left running: {left}\n{output.read_text(errors='replace')[-3000:]}"
    return code, output.read_text(errors="replace")


def outputs(programs: list[Block], text: str) -> list[str]:
    """What each block printed."""
    parts = re.split(rf"^{_DONE} \d+\n", text, flags=re.MULTILINE)
    assert len(parts) == len(programs) + 1
    return parts[:-1]


def check(page: str, folder: Path) -> None:
    """Run a page's blocks that have no mark, in order: each must succeed, what stands below one as ``text`` must be
    what it printed, and nothing may be left running. The translation has the same blocks (test_documents)."""
    everything = blocks(page)
    programs = [block for block in everything if block.is_runnable and block.sort == "run"]
    code, text = run(script(programs), folder)
    done = text.count(_DONE)
    assert code == 0, f"{programs[min(done, len(programs) - 1)].place} failed with code {code}:\n{text[-3000:]}"
    printed = dict(zip((block.place for block in programs), outputs(programs, text), strict=True))
    for program, below in itertools.pairwise(everything):
        if program.place in printed and below.language == "text" and RUNS[page].shows_output:
            wanted = output_pattern(below.text)
            assert wanted.search(printed[program.place]), f"{below.place} is not what came:\n{printed[program.place]}"
