"""The end of a process by its monitor, and log lines of its threads, where nobody reads what the process says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_fl.comm.monitor import EXIT_CODE

LIMIT_S = 60.0  # stands for never

_OUTPUT = """
import logging, os, sys, threading, time

def fill(pipe):
    os.set_blocking(pipe, False)
    try:
        while True:
            os.write(pipe, b"x")
    except BlockingIOError:
        pass

def lose(how):
    if how == "not at all":
        return
    read, write = os.pipe()
    os.dup2(write, 2)
    if how == "closed":
        os.close(2)
    if how == "gone":
        os.close(write), os.close(read)
    if how in ("full", "full and non-blocking"):
        fill(2)
        os.set_blocking(2, how == "full")
"""
_END = """
from sglang_fl.comm.monitor.ending import end_process
from sglang_fl.comm import threads
logging.basicConfig()
standby, how = sys.argv[1:]
if standby != "none":
    threads.start_early()
end = threading.Thread(target=end_process, args=("a call cannot complete.",), daemon=True)
start = threading.Thread.start
if standby != "spare":
    def refuse(thread):
        raise RuntimeError("can't start new thread")
    threading.Thread.start = refuse
lose(how)
start(end)
time.sleep(1e6)
"""
_LOG = """
from sglang_fl.comm.threads import LOG
logging.basicConfig()
LOG.start()
lose("full")
for _ in range(5000):
    LOG.error("nobody reads %s", "this")
LOG.drain(0.1)
os._exit(5)
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program behind what loses its output."""
    command = [sys.executable, "-c", _OUTPUT + program, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.parametrize("how", ["closed", "gone", "full", "full and non-blocking"])
@pytest.mark.parametrize("standby", ["spare", "only", "none"])
def test_the_process_ends_whatever_becomes_of_its_words(standby: str, how: str) -> None:
    """Given a standard error that is closed, whose reader is gone, or that is full, and threads that can be started,
    none but the one that stands by, or none at all, when the monitor ends the process, then it has ended with 71."""
    assert run(_END, standby, how).returncode == EXIT_CODE


@pytest.mark.parametrize("standby", ["spare", "only"])
def test_the_words_are_said_where_they_can_be(standby: str) -> None:
    """Given a standard error that is read, then why the process ends is there, also without a further thread."""
    ended = run(_END, standby, "not at all")
    assert ended.returncode == EXIT_CODE
    assert "[sglang_fl] a call cannot complete. This process ends with code 71." in ended.stderr


def test_a_log_line_holds_nobody() -> None:
    """Given a logger that writes into a full pipe, when thousands of lines are said, then each returns at once."""
    assert run(_LOG).returncode == 5
