"""The hosts are what the other tests here rely on: apart in everything, joined by one cable, gone afterwards."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import psutil
import pytest

from sglang_fl.testing import hosts as hosts_module
from sglang_fl.testing.hosts import ADDRESSES, NAMES, NAMESPACES, Host, HostError, two_hosts

from .conftest import Hosts

LISTEN = "import socket; s = socket.create_server((sys.argv[1], 5000)); print('listening', flush=True)"
SERVE = f"import sys; {LISTEN}; print(s.accept()[0].recv(20).decode())"
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(b'it is me')"
KINDS = [{"--mount": "mnt"}.get(option, option.removeprefix("--")) for option in NAMESPACES]


def _shell(host: Host, script: str) -> str:
    done = host.run(["/bin/sh", "-ec", script])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _namespaces(pid: int | str) -> set[int]:
    return {Path(f"/proc/{pid}/ns/{kind}").stat().st_ino for kind in KINDS}


def test_each_host_is_one_of_its_own(hosts: Hosts) -> None:
    """Given two hosts, then names, addresses, process numbers, /dev/shm and namespaces are apart, files are not."""
    first, second = hosts
    assert [_shell(host, "hostname") for host in hosts] == list(NAMES)
    assert [host.address for host in hosts] == list(ADDRESSES)
    own, other, outside = _namespaces(first.first_pid), _namespaces(second.first_pid), _namespaces("self")
    assert len(own | other | outside) == 3 * len(KINDS)
    note = Path("/dev/shm") / str(uuid.uuid4())
    _shell(first, f"echo mine > {note}")
    assert _shell(first, f"cat {note}") == "mine"
    assert _shell(second, "ls /dev/shm") == ""
    assert not note.exists()
    assert _shell(first, "ls /proc").split()[0] == "1"
    assert _shell(first, "pwd") == str(Path.cwd())


def test_the_hosts_know_and_reach_each_other(hosts: Hosts, tmp_path: Path) -> None:
    """Given a program that listens on one host, when the other calls it by name, then it hears the call."""
    first, second = hosts
    log = tmp_path / "log"
    listener = first.start([sys.executable, "-c", SERVE, first.address], log)
    while "listening" not in log.read_text():
        assert listener.poll() is None, log.read_text()
    called = second.run([sys.executable, "-c", CALL, first.name])
    assert called.returncode == 0, called.stderr
    assert listener.wait(20) == 0
    assert log.read_text().split("\n")[1] == "it is me"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_afterwards(fails: bool, tmp_path: Path) -> None:
    """Given hosts beside others of the same names, when a block ends or fails, then its processes are gone."""
    mark = f"mark-{uuid.uuid4()}"
    interfaces = psutil.net_if_addrs().keys()
    log = tmp_path / "log"
    try:
        with two_hosts() as mine, two_hosts() as others:
            every = (*mine, *others)
            started = [host.start(["/bin/sh", "-c", f"sleep 600; : {mark}"], log) for host in every]
            _shell(mine[0], f"setsid sh -c 'sleep 600; : {mark}' > /dev/null 2>&1 &")
            assert len({host.first_pid for host in every}) == len(every)
            assert len(_marked(mark)) > len(started)
            if fails:
                raise RuntimeError("planted")
    except RuntimeError as error:
        assert fails and str(error) == "planted"
    assert _marked(mark) == []
    assert [process.wait(5) for process in started] == [-9] * len(every)
    assert psutil.net_if_addrs().keys() == interfaces


def test_a_host_outlives_and_reaps_what_loses_its_parent(hosts: Hosts) -> None:
    """Given a process without a parent, when it is ended, then it is gone altogether, and the host still runs."""
    mark = f"mark-{uuid.uuid4()}"
    _shell(hosts[0], f"setsid sh -c 'sleep 600; : {mark}' > /dev/null 2>&1 &")
    orphans = [psutil.Process(pid) for pid in _marked(mark)]
    assert [orphan.ppid() for orphan in orphans] == [hosts[0].first_pid]
    orphans[0].terminate()
    assert psutil.wait_procs(orphans, timeout=20)[1] == []
    assert _shell(hosts[0], "cat /proc/1/comm") == "cat"


def _marked(mark: str) -> list[int]:
    found = psutil.process_iter(["cmdline"])
    return [process.pid for process in found if mark in " ".join(process.info["cmdline"] or [])]


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a machine without the tools, then the error names the tool and the package that has it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(hosts_module, "TOOL_FOLDERS", ())
    for name, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        with pytest.raises(HostError, match=rf"`{name}` is not installed.*apt-get install {package}"), two_hosts():
            pass
        (tmp_path / name).symlink_to("/bin/true")
