"""Real SGLang servers on this machine for the demo, the tests and the benchmarks; none outlives its block."""

from __future__ import annotations

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

READY = "The server is fired up and ready to roll"

# What SGLang 0.5.11 needs to run on a CPU; facts about each are in docs/cpu.md.
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "/nonexistent",  # without the plugin, PyNccl would load the libnccl of a CUDA torch
    "TORCHDYNAMO_DISABLE": "1",  # inductor compiles for half a minute at the first forward
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


class ServerError(RuntimeError):
    """A server did not become ready, or went away; the text holds the end of its log."""


def free_port() -> int:
    """A TCP port of the loopback address that was free a moment ago, away from the ephemeral range."""
    for port in range(20000 + os.getpid() * 37 % 9000, 32000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise ServerError("no free port between 20000 and 32000 on 127.0.0.1")


@dataclass
class Server:
    """One ``sglang.launch_server`` on the CPU, started by ``with``; with ``nodes`` > 1, one process tree a node.

    Attributes:
        model: folder of the model.
        arguments: further arguments of the command.
        environment: added to this process's; a value of None removes the variable.
        folder: where logs go.
        tp, pp, dp: parallel sizes; ``tp * pp`` ranks bind one CPU list each.
        nodes: number of nodes, all on this machine.
        ready_limit_s: how long to wait for it.
    """

    model: Path
    folder: Path
    arguments: Sequence[str] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1
    ready_limit_s: float = 240.0
    port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ready_after_s: float = 0.0

    def command(self, node: int = 0) -> list[str]:
        """The exact command of one node."""
        sizes = [
            f"--{name}-size={size}" for name, size in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if size > 1
        ]
        multi = [f"--nnodes={self.nodes}", f"--node-rank={node}", f"--dist-init-addr=127.0.0.1:{self.port + 7}"]
        return [
            *(sys.executable, "-m", "sglang.launch_server", f"--model-path={self.model}"),
            *("--host=127.0.0.1", f"--port={self.port + node * 3}"),
            *CPU_ARGUMENTS,
            *sizes,
            *(multi if self.nodes > 1 else []),
            *self.arguments,
        ]

    def variables(self) -> dict[str, str]:
        """What the server's environment has beside this process's."""
        binding = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" for _ in range(self.tp))} if self.tp > 1 else {}
        merged: dict[str, str | None] = {**CPU_ENVIRONMENT, **binding, **self.environment}
        return {name: value for name, value in merged.items() if value is not None}

    def shell_command(self, node: int = 0) -> str:
        """The command as one would type it."""
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.variables().items())
        return f"{variables} {shlex.join(self.command(node))}"

    def log_path(self, node: int = 0) -> Path:
        """Log of one node: standard output and error."""
        return self.folder / f"server-{self.port}-node{node}.log"

    def log(self, node: int = 0) -> str:
        """The log so far."""
        return self.log_path(node).read_text(errors="replace")

    def __enter__(self) -> Server:
        """Start it and wait until it is ready."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment.update(self.variables())
        for name, value in self.environment.items():
            if value is None:
                environment.pop(name, None)
        start = time.monotonic()
        for node in range(self.nodes):
            with self.log_path(node).open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        self.command(node),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                )
        try:
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

    def _wait_until_ready(self, start: float) -> None:
        while READY not in self.log():
            ended = [process for process in self.processes if process.poll() is not None]
            late = time.monotonic() - start > self.ready_limit_s
            if ended or late:
                what = (
                    f"ended with code {ended[0].returncode}" if ended else f"not ready after {self.ready_limit_s:g} s"
                )
                tails = "\n".join(self.log(node)[-6000:] for node in range(self.nodes))
                raise ServerError(f"{self.shell_command()}\n{what}; its log ends:\n{tails}")
            time.sleep(0.1)

    def post(self, path: str, body: Mapping[str, Any], limit_s: float = 120.0) -> Any:
        """POST ``body`` as JSON and return the reply's.

        Raises:
            ServerError: the server is gone or answers with an error.
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: HTTP {error.code}: {error.read().decode(errors='replace')[:2000]}") from error
        except OSError as error:
            raise ServerError(f"{path}: {error}; the log ends:\n{self.log()[-4000:]}") from error

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
        return [process for process in self.tree() if "sglang::scheduler" in " ".join(process.cmdline())]

    def tree(self) -> list[psutil.Process]:
        """Every process of the server."""
        found: dict[int, psutil.Process] = {}
        for started in self.processes:
            try:
                top = psutil.Process(started.pid)
                found.update({process.pid: process for process in [top, *top.children(recursive=True)]})
            except psutil.NoSuchProcess:
                continue
        return list(found.values())

    def stop(self) -> None:
        """End every process of the server: politely, then by force."""
        everything = self.tree()
        for process in self.processes:
            _signal_session(process, signal.SIGTERM)
        psutil.wait_procs(everything, timeout=5)
        for process in self.processes:
            _signal_session(process, signal.SIGKILL)
        for straggler in everything:
            if straggler.is_running():
                straggler.kill()
        psutil.wait_procs(everything, timeout=10)
        for process in self.processes:
            process.wait(timeout=10)


def _signal_session(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
