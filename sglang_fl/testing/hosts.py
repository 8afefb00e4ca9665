"""Two hosts on one machine for tests of several nodes: namespaces of the kernel, joined by a virtual cable.

Each has its own network with one address, host name, hosts file, /dev/shm, process numbers and System V memory. Needs
root, ``ip`` (Debian's iproute2) and ``unshare`` and ``nsenter`` (util-linux).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import psutil

from sglang_fl.testing.server import HOST, READY, Environment, Server, ServerError

# Nobody outside the two namespaces sees these, so several runs at once may use the same.
NAMES = ("host-a", "host-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "eth0"
NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
TOOL_FOLDERS = ("/usr/sbin", "/sbin")  # beside PATH, where an ordinary user's does not have them
_PACKAGES = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "env": "coreutils"}
_START_LIMIT_S = 20.0

# The first process of a host. It reaps what loses its parent, and ends, and with it the kernel ends every process of
# the host, when its standard input is closed: at the latest when the process that made the host is gone.
_FIRST_PROCESS = """
hostname "$1"
mount -t tmpfs -o size=8g tmpfs /dev/shm
mount --bind "$2" /etc/hosts
ip link set lo up
echo ready
exec env --ignore-signal=CHLD cat > /dev/null
"""

# A POST of what comes in, or a GET if nothing does.
_REQUEST = """
import sys, urllib.error, urllib.request
body = sys.stdin.buffer.read() or None
request = urllib.request.Request(sys.argv[1], body, {"content-type": "application/json"})
try:
    reply = urllib.request.urlopen(request, timeout=float(sys.argv[2]))
except urllib.error.HTTPError as error:
    sys.exit(f"HTTP {error.code}: {error.read().decode(errors='replace')[:2000]}")
except OSError as error:
    sys.exit(str(error))
sys.stdout.buffer.write(reply.read())
"""


class HostError(RuntimeError):
    """A host could not be made; the text says what is missing and what to install."""


@dataclass(frozen=True)
class Host:
    """One of the two; lives until the block that made it ends.

    Attributes:
        name: its host name, which both hosts resolve.
        address: its only address beside the loopback.
        first_pid: its first process, by the number that it has outside.
    """

    name: str
    address: str
    first_pid: int

    def command(self, command: Sequence[str]) -> list[str]:
        """``command`` (its first word an absolute path) as one that runs on this host, in the same folder."""
        return [_tool("nsenter"), f"--target={self.first_pid}", *NAMESPACES, "--wd", "--", *command]

    def start(self, command: Sequence[str], log: Path, environment: Environment | None = None) -> subprocess.Popen[str]:
        """Start ``command``; its output and errors go to ``log``. It ends with the host at the latest."""
        with log.open("w") as file:
            return subprocess.Popen(
                self.command(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_environment(environment or {}),
                text=True,
            )

    def run(self, command: Sequence[str], limit_s: float = 60.0, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run ``command`` to its end with ``text`` as its input."""
        return subprocess.run(
            self.command(command), input=text, capture_output=True, text=True, timeout=limit_s, check=False
        )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make the two hosts; afterwards, also after a failure, none of their processes is left.

    Raises:
        HostError: not root, a tool is missing, or the kernel forbids namespaces.
    """
    if os.geteuid() != 0:
        raise HostError("two_hosts makes network namespaces: run it as root, or in a container whose root may")
    for tool in _PACKAGES:
        _tool(tool)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang_fl-hosts-")))
        hosts_file = folder / "hosts"
        lines = [f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES, strict=True)]
        hosts_file.write_text("127.0.0.1 localhost\n" + "".join(lines))
        first, second = (
            Host(name, address, stack.enter_context(_first_process(name, hosts_file)))
            for name, address in zip(NAMES, ADDRESSES, strict=True)
        )
        _join(first, second)
        yield first, second


@contextmanager
def _first_process(name: str, hosts_file: Path) -> Iterator[int]:
    command = [_tool("unshare"), *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
    command += ["/bin/sh", "-ec", _FIRST_PROCESS, "sh", name, str(hosts_file)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != b"ready\n":
            process.wait(_START_LIMIT_S)
            raise HostError(f"{' '.join(command[:8])}: {process.stderr.read().decode(errors='replace').strip()}")
        yield psutil.Process(process.pid).children()[0].pid
    finally:
        with suppress(psutil.NoSuchProcess):
            for first in psutil.Process(process.pid).children():
                first.kill()
        process.communicate()  # the kernel lets the first process go when all others of the host are gone


def _join(first: Host, second: Host) -> None:
    ends = [["name", INTERFACE, "netns", str(host.first_pid)] for host in (first, second)]
    cable = [_tool("ip"), "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]
    steps = [subprocess.run(cable, capture_output=True, text=True, check=False)]
    for host in (first, second):
        steps.append(host.run([_tool("ip"), "address", "add", f"{host.address}/24", "dev", INTERFACE]))
        steps.append(host.run([_tool("ip"), "link", "set", INTERFACE, "up"]))
    for done in steps:
        if done.returncode:
            raise HostError(f"{' '.join(done.args)}: {done.stderr.strip()}")


def _tool(name: str) -> str:
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *TOOL_FOLDERS]))
    if path is None:
        package = _PACKAGES[name]
        raise HostError(f"`{name}` is not installed; it makes the hosts. As root: apt-get install {package}")
    return path


def _environment(changes: Environment) -> dict[str, str]:
    environment = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    removed = {name for name, value in changes.items() if value is None} | {"PYTHONDONTWRITEBYTECODE"}
    return {name: value for name, value in environment.items() if name not in removed}


@dataclass
class ServerOnHosts(Server):
    """One ``sglang.launch_server`` whose node r runs on ``hosts[r]``; requests are made on the first host."""

    _: KW_ONLY
    hosts: tuple[Host, ...]
    nodes: int = 2

    def command(self, node: int = 0) -> list[str]:
        """The exact command of one node."""
        meeting = f"--dist-init-addr={HOST}:"
        own = [
            argument.replace(meeting, f"--dist-init-addr={self.hosts[0].address}:")
            for argument in super().command(node)
        ]
        return self.hosts[node].command(own)

    def variables(self, node: int = 0) -> dict[str, str | None]:
        """The variables that matter to one node; SGLang is told the address, which it would else look for outside."""
        return {"SGLANG_HOST_IP": self.hosts[node].address, **super().variables(node)}

    def __enter__(self) -> ServerOnHosts:
        """See :meth:`Server.__enter__`."""
        start = time.monotonic()
        try:
            self.start()
            while not (READY in self.log() and self._answers()):
                ended = [process for process in self.processes if process.poll() is not None]
                if ended or time.monotonic() - start > self.ready_limit_s:
                    raise ServerError(f"{self.shell_command()}\nit is not ready; the logs end:\n{self.logs()[-9000:]}")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        self.ready_after_s = time.monotonic() - start
        return self

    def post(self, path: str, body: Mapping[str, Any], limit_s: float = 120.0) -> Any:
        """See :meth:`Server.post`."""
        done = self._request(path, json.dumps(body), limit_s)
        if done.returncode:
            raise ServerError(f"{path}: {done.stderr.strip()}; the logs end:\n{self.logs()[-9000:]}")
        return json.loads(done.stdout)

    def _request(self, path: str, body: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        url = urllib.parse.urlunsplit(("http", f"{HOST}:{self.port}", path, "", ""))
        command = [sys.executable, "-IS", "-c", _REQUEST, url, str(limit_s)]
        return self.hosts[0].run(command, limit_s + 10, body)

    def _answers(self) -> bool:
        return self._request("/get_model_info", "", 5.0).returncode == 0
