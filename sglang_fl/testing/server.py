"""Real SGLang servers on this machine for the demo, the tests and the benchmarks; none outlives its block."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from sglang_fl.config.fields import FIELD_BY_VARIABLE

READY = "The server is fired up and ready to roll"
HOST = "127.0.0.1"
Environment = Mapping[str, "str | None"]

# What SGLang 0.5.11 needs to run on a CPU; docs/cpu.md has the reason of each.
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "/nonexistent",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
CPU_ARGUMENTS = (
    "--device=cpu",
    "--max-total-tokens=4096",
    "--grammar-backend=none",
    "--skip-server-warmup",
    "--disable-custom-all-reduce",
    "--disable-radix-cache",
)

# Below the ports that the kernel hands out by itself. A server takes the first of a block for HTTP, the next
# for further nodes, and SGLang some behind --dist-init-addr; with DP attention also some 233 behind the first.
_PORTS = range(15000, 32000)
_PORTS_PER_SERVER = 40
_port_blocks = itertools.count(os.getpid() * 37)
_WATCH_PARENT = Path(__file__).with_name("watch_parent.py")


class ServerError(RuntimeError):
    """A server did not become ready, did not end, or went away; the text holds the end of its log."""


def free_port() -> int:
    """The first of a block of TCP ports of the loopback address that were all free a moment ago."""
    blocks = len(_PORTS) // _PORTS_PER_SERVER
    for block in itertools.islice(_port_blocks, blocks):
        first = _PORTS[block % blocks * _PORTS_PER_SERVER]
        if all(_is_free(port) for port in range(first, first + _PORTS_PER_SERVER)):
            return first
    raise ServerError(f"no {_PORTS_PER_SERVER} free ports in a row from {_PORTS[0]} to {_PORTS[-1]} on {HOST}")


@dataclass
class Server:
    """One ``sglang.launch_server`` on the CPU, started by ``with``; with ``nodes`` > 1, one process tree a node.

    SGLANG_*, the plugin's own variables and those of CPU_ENVIRONMENT are taken from this process where it has
    them. When this process ends, however it does, its servers end too.

    Attributes:
        model: folder of the model.
        folder: where logs go.
        arguments: further arguments of the command.
        environment: on top of this process's; a value of None removes the variable.
        node_environments: for single nodes, by node rank, on top of that.
        tp, pp, dp: parallel sizes; ``tp * pp`` scheduler processes.
        nodes: number of nodes, all on this machine.
        ready_limit_s: how long to wait for it.
        on_wait: called about ten times a second while waiting, with the new lines of node 0's log.
    """

    model: Path
    folder: Path
    arguments: Sequence[str] = ()
    environment: Environment = field(default_factory=dict)
    node_environments: Mapping[int, Environment] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1
    ready_limit_s: float = 300.0
    on_wait: Callable[[list[str]], None] | None = None
    port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ready_after_s: float = 0.0
    _watcher: subprocess.Popen[bytes] | None = None

    @property
    def world_size(self) -> int:
        """Number of scheduler processes on all nodes."""
        return self.tp * self.pp

    def command(self, node: int = 0) -> list[str]:
        """The exact command of one node."""
        sizes = [
            f"--{name}-size={size}" for name, size in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if size > 1
        ]
        multi = [f"--nnodes={self.nodes}", f"--node-rank={node}", f"--dist-init-addr={HOST}:{self.port + 10}"]
        return [
            *(sys.executable, "-m", "sglang.launch_server", f"--model-path={self.model}"),
            *(f"--host={HOST}", f"--port={self.port + node}"),
            *CPU_ARGUMENTS,
            *sizes,
            *(multi if self.nodes > 1 else []),
            *self.arguments,
        ]

    def variables(self, node: int = 0) -> dict[str, str | None]:
        """The variables that matter to one node; None: not set there."""
        cpus = sorted(os.sched_getaffinity(0))
        lists = [str(cpus[rank % len(cpus)]) for rank in range(self.tp)]
        binding = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(lists)} if self.tp > 1 else {}
        wanted = {**CPU_ENVIRONMENT, **binding}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("SGLANG_") or name in FIELD_BY_VARIABLE or name in wanted
        }
        return {**wanted, **inherited, **self.environment, **self.node_environments.get(node, {})}

    def shell_command(self, node: int = 0) -> str:
        """The command as one would type it."""
        variables = self.variables(node)
        removed = [f"-u {name}" for name, value in variables.items() if value is None and name in os.environ]
        prefix = ["env", *removed] if removed else []
        given = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if value is not None]
        return " ".join([*prefix, *given, shlex.join(self.command(node))])

    def log_path(self, node: int = 0) -> Path:
        """Log of one node: standard output and error."""
        return self.folder / f"server-{self.port}-node{node}.log"

    def log(self, node: int = 0) -> str:
        """The log so far."""
        return self.log_path(node).read_text(errors="replace")

    def logs(self) -> str:
        """The logs of all nodes."""
        return "\n".join(self.log(node) for node in range(self.nodes))

    def __enter__(self) -> Server:
        """Start it and wait until it is ready.

        Raises:
            ServerError: it ended, or was not ready in time; nothing of it is left.
        """
        start = time.monotonic()
        try:
            self.start()
            self._wait_until_ready(start)
        except BaseException:
            self.stop()
            raise
        self.ready_after_s = time.monotonic() - start
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, with every process of it."""
        self.stop()

    def start(self) -> None:
        """Start the processes of all nodes; the caller must :meth:`stop` them."""
        for node in range(self.nodes):
            environment = dict(os.environ)
            # .pyc files halve the time that each of its processes needs to import SGLang.
            variables = {"PYTHONDONTWRITEBYTECODE": None, **self.variables(node)}
            for name, value in variables.items():
                environment.pop(name, None)
                if value is not None:
                    environment[name] = value
            with self.log_path(node).open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        self.command(node),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                )
        sessions = [str(process.pid) for process in self.processes]
        self._watcher = subprocess.Popen(
            [sys.executable, "-IS", str(_WATCH_PARENT), *sessions],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def run_to_end(self, limit_s: float = 300.0) -> list[int]:
        """Start a server that is expected to end by itself; see :meth:`wait_for_end`. Nothing of it is left."""
        try:
            self.start()
            return self.wait_for_end(limit_s)
        finally:
            self.stop()

    def wait_for_end(self, limit_s: float = 300.0) -> list[int]:
        """Wait until the main processes of all nodes have ended by themselves; exit codes by node.

        Raises:
            ServerError: a node still ran after ``limit_s`` seconds, or the server became ready.
        """
        start = time.monotonic()
        while any(process.poll() is None for process in self.processes):
            is_ready = READY in self.log()
            if is_ready or time.monotonic() - start > limit_s:
                what = "became ready" if is_ready else f"was still running after {limit_s:g} s"
                raise ServerError(f"{self.shell_command()}\n{what}, it should have ended; {self._tails()}")
            time.sleep(0.1)
        return [process.returncode for process in self.processes]

    def _wait_until_ready(self, start: float) -> None:
        lines = self._new_lines()
        while not (READY in self.log() and not _is_free(self.port)):
            if self.on_wait is not None:
                self.on_wait(next(lines))
            ended = [process for process in self.processes if process.poll() is not None]
            if ended or time.monotonic() - start > self.ready_limit_s:
                code = f"ended with code {ended[0].returncode}" if ended else ""
                what = code or f"was not ready after {self.ready_limit_s:g} s"
                raise ServerError(f"{self.shell_command()}\n{what}; {self._tails()}")
            time.sleep(0.1)

    def _new_lines(self) -> Iterator[list[str]]:
        seen = 0
        while True:
            lines = self.log().splitlines()
            yield lines[seen:]
            seen = len(lines)

    def _tails(self) -> str:
        tails = (f"the log of node {node} ends:\n{self.log(node)[-6000:]}" for node in range(self.nodes))
        return "\n".join(tails)

    def post(self, path: str, body: Mapping[str, Any], limit_s: float = 120.0) -> Any:
        """POST ``body`` as JSON and return the reply's.

        Raises:
            ServerError: the server is gone or answers with an error.
        """
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: HTTP {error.code}: {error.read().decode(errors='replace')[:2000]}") from error
        except OSError as error:
            raise ServerError(f"{path}: {error}; {self._tails()}") from error

    def generate(self, prompt: str | Sequence[int], new_tokens: int, **more: Any) -> list[int]:
        """Greedy tokens for a text or for token ids."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        reply = self.post("/generate", {key: prompt, "sampling_params": sampling, **more})
        tokens: list[int] = reply["output_ids"]
        return tokens

    def chat(self, question: str, new_tokens: int = 16) -> str:
        """The answer of /v1/chat/completions, greedy."""
        reply = self.post(
            "/v1/chat/completions",
            {
                "model": "default",
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": new_tokens,
            },
        )
        answer: str = reply["choices"][0]["message"]["content"]
        return answer

    def schedulers(self) -> list[psutil.Process]:
        """The scheduler processes, by the title that SGLang gives them."""
        return [process for process in self.tree() if _title(process).startswith("sglang::scheduler")]

    def tree(self) -> list[psutil.Process]:
        """Every process of the server: those of the nodes' sessions, whoever their parent is by now."""
        sessions = {process.pid for process in self.processes}
        return [process for process in psutil.process_iter() if _session(process.pid) in sessions]

    def stop(self) -> None:
        """End every process of the server: politely, then by force. Idempotent."""
        everything = self.tree()
        for number, limit_s in ((signal.SIGTERM, 5), (signal.SIGKILL, 10)):
            for process in everything:
                _signal(process, number)
            psutil.wait_procs(everything, timeout=limit_s)
            everything = self.tree()
        for started in self.processes:
            started.wait(timeout=10)
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) != 0


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
