"""The servers that are measured: each configuration's command and variables, on GPUs or on a CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.e2e import server_plugin
from benchmarks.e2e.configurations import FLAGCX_BACKEND, PLUGIN, Configuration
from benchmarks.e2e.options import FLAGCX_VARIABLE
from benchmarks.e2e.server_plugin.controls import OFF
from sglang_fl.testing.server import HOST, Server, ServerError

COMMON_ARGUMENTS = ("--load-format=dummy", "--skip-tokenizer-init", "--random-seed=1", "--disable-radix-cache")
DP_ATTENTION = "--enable-dp-attention"
ALONE_MEMORY = 0.6  # of a GPU's
# Without NCCL the groups stay with torch.
CPU_VALUES = {"nccl": "torch"}
GPU_ARGUMENTS = (
    "--attention-backend=triton",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--cuda-graph-max-bs=32",
    f"--mem-fraction-static={ALONE_MEMORY}",
)
# Of servers that run at the same time: all together of a GPU's memory, graphs and workspaces not counted; and tokens,
# alike for all, since the later ones find less memory.
TOGETHER_MEMORY = 0.8
TOGETHER_TOKENS = 65536
# NVLink multicast stays off on shared machines; a cut-down sgl_kernel has no version of its own.
GPU_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
}
FREE_WAIT_S = 60.0
FREE_SLACK_MIB = 1024
# The plugin's line of each group, whose first word after the ranks is what carries it, also in mode fastest.
_GROUP = re.compile(r"group (?P<name>.+?) ranks \[(?P<ranks>[\d, ]+)\]: (?P<carrier>[^;]*)")


@dataclass
class MeasuredServer(Server):
    """One server with random weights, on GPUs or on a CPU; its log is ``log_name`` with ``.log``."""

    is_on_gpu: bool = True
    log_name: str = "server"

    def command(self, node: int = 0) -> list[str]:
        """The exact command."""
        if not self.is_on_gpu:
            return [*super().command(node), *COMMON_ARGUMENTS]
        given = (("tp", self.tp), ("pp", self.pp), ("dp", self.dp))
        sizes = [f"--{name}-size={size}" for name, size in given if size > 1]
        place = [f"--model-path={self.model}", f"--host={HOST}", f"--port={self.port}"]
        program = [sys.executable, "-m", "sglang.launch_server"]
        return [*program, *place, *sizes, *COMMON_ARGUMENTS, *GPU_ARGUMENTS, *self.arguments]

    def variables(self, node: int = 0) -> dict[str, str | None]:
        """The variables that matter to it."""
        if not self.is_on_gpu:
            return super().variables(node)
        return {**{name: os.environ.get(name, value) for name, value in GPU_ENVIRONMENT.items()}, **self.environment}

    def log_path(self, node: int = 0) -> Path:
        """The log of this start."""
        return self.folder / f"{self.log_name}.log"


@dataclass(frozen=True)
class Share:
    """Which of ``of`` servers on the same GPUs one is, by the order of their starts; the first is 0."""

    place: int = 0
    of: int = 1

    def arguments(self) -> tuple[str, ...]:
        """What gives it as much memory as the others; SGLang counts a fraction of what is free at the start."""
        if self.of == 1:
            return ()
        each = TOGETHER_MEMORY / self.of
        return (
            f"--mem-fraction-static={each / (1 - self.place * each):.3f}",
            f"--max-total-tokens={TOGETHER_TOKENS}",
        )


@dataclass(frozen=True)
class Site:
    """Where servers run, for all starts of a run.

    Attributes:
        model: folder of the shape's config.json.
        plugin: folder of the benchmark's own SGLang plugin.
        folder: logs and reports.
        tp: ranks, each with a GPU of its own, or on a CPU.
        arguments: further arguments of all servers.
        memory_mib: used by others on each GPU before the first start.
        pp: stages, each of ``tp`` ranks.
        has_dp_attention: whether each rank of a stage has the attention of its own requests.
        flagcx: FLAGCX_PATH of the configurations with FlagCX; empty: as in this process.
    """

    model: Path
    plugin: Path
    folder: Path
    tp: int
    is_on_gpu: bool
    arguments: tuple[str, ...] = ()
    memory_mib: tuple[int, ...] = ()
    pp: int = 1
    has_dp_attention: bool = False
    flagcx: str = ""

    @property
    def ranks(self) -> int:
        """Of all stages."""
        return self.tp * self.pp

    def server(
        self,
        configuration: Configuration,
        name: str,
        limit_s: float,
        switch: Path | None,
        share: Share = Share(),
    ) -> MeasuredServer:
        """A server that is not started yet; with a ``switch`` it has the faults of the controls, switched off.

        What an earlier start of this ``name`` reported is removed.
        """
        for path in (*self.folder.glob(f"{name}.weights.rank*"), self.recorded_path(name)):
            path.unlink(missing_ok=True)
        dp_attention = (DP_ATTENTION,) if self.has_dp_attention else ()
        on_gpu = (*configuration.arguments, *share.arguments()) if self.is_on_gpu else ()
        arguments = (*on_gpu, *dp_attention, *self.arguments)
        environment = self._environment(configuration, name)
        if switch is not None:
            switch.write_text(OFF)
            environment[server_plugin.SWITCH_VARIABLE] = str(switch)
        return MeasuredServer(
            self.model,
            self.folder,
            arguments,
            environment,
            tp=self.tp,
            pp=self.pp,
            dp=self.tp if self.has_dp_attention else 1,
            ready_limit_s=limit_s,
            is_on_gpu=self.is_on_gpu,
            log_name=name,
        )

    def why_no_graph_time(self) -> str:
        """Why a decode step's GPU time is not that of one graph on each rank; empty where it is."""
        if self.pp > 1:
            return "with stages a decode step is a graph of each and the transfers between them"
        return "with DP attention each rank has a batch of its own" if self.has_dp_attention else ""

    def recorded_path(self, name: str) -> Path:
        """Where layer 1 records its operators."""
        return self.folder / f"{name}.operators"

    def _environment(self, configuration: Configuration, name: str) -> dict[str, str | None]:
        paths = [str(self.plugin), *(str(Path(part).resolve()) for part in _python_path())]
        plugins = [PLUGIN, server_plugin.NAME] if configuration.layers else [server_plugin.NAME]
        settings = {
            key: value.format(recorded=self.recorded_path(name)) for key, value in configuration.environment.items()
        }
        if not self.is_on_gpu:
            settings = {key: CPU_VALUES.get(value, value) for key, value in settings.items()}
        if self.flagcx and configuration.has_flagcx:
            settings[FLAGCX_VARIABLE] = self.flagcx
        if self.has_dp_attention and not self.is_on_gpu and not configuration.layers:
            settings[server_plugin.CPU_HOOKS_VARIABLE] = "1"
        return {
            **settings,
            "PYTHONPATH": os.pathsep.join(paths),
            "SGLANG_PLUGINS": ",".join(plugins),
            server_plugin.REPORT_VARIABLE: str(self.folder / f"{name}.weights"),
        }

    def check(self, server: Server, configuration: Configuration) -> dict[str, Any]:
        """That the server is what the configuration says; its weights' report by rank, and the plugin's lines.

        Raises:
            ServerError: it is not: the plugin or a layer is on where it should not be, or the reverse; or a group of
                several ranks is not carried by FlagCX where it should be.
        """
        reports = {}
        for rank in range(self.ranks):
            path = self.folder / f"{server.log_path().stem}.weights.rank{rank}"
            if not path.exists():
                raise ServerError(
                    f"rank {rank} did not get the benchmark's weights, {path} is not there; see {server.log_path()}"
                )
            reports[rank] = json.loads(path.read_text())
        lines = [line.split("[sglang_fl]", 1)[1].strip() for line in server.log().splitlines() if "[sglang_fl]" in line]
        if bool(lines) != bool(configuration.layers):
            raise ServerError(
                f"{configuration.name}: the plugin is {'on' if lines else 'off'}; see {server.log_path()}"
            )
        if self.is_on_gpu:
            _require_layers(configuration, lines, server.log_path())
        if configuration.has_flagcx and self.ranks > 1:
            _require_flagcx(configuration, self.ranks, lines, server.log_path())
        return {"reports": reports, "lines": list(dict.fromkeys(lines))}

    def wait_until_free(self) -> None:
        """Wait until the GPUs hold no more than before the first start.

        Raises:
            ServerError: they still do after FREE_WAIT_S seconds.
        """
        start = time.monotonic()
        while self.memory_mib and any(map(_is_above, used_memory_mib(), self.memory_mib)):
            if time.monotonic() - start > FREE_WAIT_S:
                raise ServerError(
                    f"the GPUs hold {used_memory_mib()} MiB, {self.memory_mib} before the first start, "
                    f"{FREE_WAIT_S:g} s after the last server ended; end what uses them"
                )
            time.sleep(0.5)


def _is_above(now: int, before: int) -> bool:
    return now > before + FREE_SLACK_MIB


def used_memory_mib() -> tuple[int, ...]:
    """Memory in use on each GPU, by nvidia-smi, which needs no context on them; empty where it cannot tell."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return tuple(map(int, lines)) if all(line.strip().isdigit() for line in lines) else ()


def _require_layers(configuration: Configuration, lines: list[str], log: Path) -> None:
    for layer in configuration.layers:
        own = [line for line in lines if line.startswith(f"layer {layer},")]
        if not any(": on:" in line for line in own) or any(": off:" in line for line in own):
            raise ServerError(f"{configuration.name}: layer {layer} is not on: {own}; see {log}")


def _require_flagcx(configuration: Configuration, ranks: int, lines: list[str], log: Path) -> None:
    """On GPUs and on a CPU: each group of several ranks says ``flagcx``, and every rank is in one of them."""
    groups = [found for line in lines if (found := _GROUP.match(line)) and "," in found["ranks"]]
    others = {found.string: None for found in groups if found["carrier"].strip() != FLAGCX_BACKEND}
    if others:
        raise ServerError(f"{configuration.name}: not carried by {FLAGCX_BACKEND}: {'; '.join(others)}; see {log}")
    seen = {int(rank) for found in groups for rank in found["ranks"].split(",")}
    if seen != set(range(ranks)):
        raise ServerError(
            f"{configuration.name}: {ranks} ranks, and groups of several say what carries them for ranks "
            f"{sorted(seen) or 'none'} only; see {log}"
        )


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def install_plugin(folder: Path) -> Path:
    """Write the benchmark's own SGLang plugin as a distribution into ``folder``, for PYTHONPATH; returns it."""
    source = Path(server_plugin.__file__).parent
    shutil.copytree(source, folder / server_plugin.NAME, ignore=shutil.ignore_patterns("__pycache__"))
    described = folder / f"{server_plugin.NAME}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {server_plugin.NAME}\nVersion: 1.0\n")
    entry_point = f"[sglang.srt.plugins]\n{server_plugin.NAME} = {server_plugin.NAME}:load\n"
    (described / "entry_points.txt").write_text(entry_point)
    return folder
