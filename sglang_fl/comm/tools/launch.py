"""Where a process started by torchrun stands, its device, and its two process groups; also for one process alone."""

from __future__ import annotations

import os
import reprlib
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from sglang_fl.comm.communicator import group_context
from sglang_fl.comm.errors import CommError
from sglang_fl.comm.graph_mixing import prepare
from sglang_fl.comm.limits import checked_limit
from sglang_fl.comm.types import GroupContext
from sglang_fl.config import Settings, load_settings
from sglang_fl.config.numbers import whole_number

WORLD = "world"


class LaunchError(CommError):
    """This process cannot take part; its text says which variable or device is wrong and what to do."""


@dataclass(frozen=True)
class Place:
    """This process among all: global rank, rank on its host, and how many there are of each."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


# torchrun's variables, in the order of Place's fields.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def place_of(environment: Mapping[str, str]) -> Place:
    """From torchrun's variables; one process alone where none of RANK and WORLD_SIZE is set.

    Raises:
        LaunchError: some of the variables are missing, no numbers, or contradict each other.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Place()
    found = {name: environment.get(name, "") for name in VARIABLES}
    numbers = [number for value in found.values() if (number := whole_number(value)) is not None]
    if len(numbers) < len(found):
        bad = [f"{name}={reprlib.repr(value)}" for name, value in found.items() if whole_number(value) is None]
        raise LaunchError(
            f"{', '.join(bad)}: torchrun sets {', '.join(VARIABLES)} to whole numbers; start this with "
            f"torchrun --nproc-per-node N -m ..., or unset RANK and WORLD_SIZE to run one process"
        )
    place = Place(*numbers)
    if place.rank < place.world_size and place.local_rank < place.local_world_size <= place.world_size:
        return place
    text = ", ".join(f"{name}={value}" for name, value in found.items())
    raise LaunchError(f"{text}: a rank must be less than its world size, and a host's share at most the whole")


def device_of(place: Place, device_type: str, device_count: int) -> torch.device:
    """The device of this process: by its rank on this host, whatever its global rank.

    Raises:
        LaunchError: the host has fewer devices than processes.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    if place.local_rank >= device_count:
        raise LaunchError(
            f"LOCAL_RANK={place.local_rank}, but this host has {device_count} {device_type} device(s) that this "
            f"process sees; start at most {device_count} processes a host, or choose --device cpu"
        )
    return torch.device(device_type, place.local_rank)


def detect_device_type(settings: Settings) -> str:
    """``cpu`` where the settings or torch know no other."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or settings.system.platform == "cpu":
        return "cpu"
    return accelerator.type


@dataclass(frozen=True)
class Launch:
    """One process of a launch.

    Attributes:
        place, device: where it stands.
        settings: this process's.
        context: the group of all ranks; its exchange is how the tools bring results together.
        hosts: host name of each rank, in rank order.
    """

    place: Place
    device: torch.device
    settings: Settings
    context: GroupContext
    hosts: tuple[str, ...]

    @property
    def is_first(self) -> bool:
        """Whether this rank does the talking."""
        return self.place.rank == 0

    @property
    def host_count(self) -> int:
        """Number of hosts, by name."""
        return len(set(self.hosts))

    def say(self, text: str = "") -> None:
        """Print on rank 0, at once."""
        if self.is_first:
            print(text, flush=True)

    def exchange(self, stage: str, value: Any) -> list[Any]:
        """Every rank's ``value``; all ranks must call it."""
        return self.context.exchange(stage, value)

    def on_first(self, stage: str, call: Callable[[], None]) -> None:
        """``call`` on rank 0; what it raises, all ranks raise, so that none waits. All ranks must call it.

        Raises:
            CommError: the text of what it raised, an OSError or a CommError.
        """
        problem = ""
        if self.is_first:
            try:
                call()
            except (CommError, OSError) as error:
                problem = str(error)
        problem = self.exchange(stage, problem)[0]
        if problem:
            raise CommError(problem)

    def synchronize(self) -> None:
        """Wait for what is enqueued on the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)


@contextmanager
def launched(device_type: str | None, timeout_s: float, options: Mapping[str, str] | None = None) -> Iterator[Launch]:
    """Join the other ranks; all ranks must enter. A default process group that is there already is used and kept.

    Args:
        device_type: as in ``torch.device``; None means the accelerator if there is one.
        timeout_s: limit of each step and of each collective over gloo, seconds.

    Raises:
        LaunchError: see :func:`place_of` and :func:`device_of`.
        ValueError: the limit is no number of seconds from a millisecond to a year.
    """
    checked_limit("timeout_s", timeout_s)
    settings = load_settings()
    place = place_of(os.environ)
    kind = device_type or detect_device_type(settings)
    device = device_of(place, kind, _device_count(kind))
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    is_ours = not dist.is_initialized()
    mixing = prepare(settings, kind, 1 if place.world_size == place.local_world_size else None)
    if is_ours:
        _initialize(place, timeout_s)
    try:
        launch = _joined(place, device, settings, timeout_s)
        if mixing is not None:
            launch.say(f"# {mixing.line()}")
        yield launch
    finally:
        if is_ours and dist.is_initialized():
            dist.destroy_process_group()


def _device_count(device_type: str) -> int:
    if device_type == "cpu":
        return 0
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError as error:
        raise LaunchError(f"--device {device_type}: torch {torch.__version__} knows no such device: {error}") from error
    return int(module.device_count()) if module.is_available() else 0


def _initialize(place: Place, timeout_s: float) -> None:
    limit = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=limit)
        return
    dist.init_process_group("gloo", store=HashStore(), rank=place.rank, world_size=place.world_size, timeout=limit)


def _joined(place: Place, device: torch.device, settings: Settings, timeout_s: float) -> Launch:
    ranks = list(range(place.world_size))
    limit = timedelta(seconds=timeout_s)
    cpu_group: ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=limit)
    backend = dist.get_default_backend_for_device(device)
    device_group: ProcessGroup = dist.new_group(ranks, backend=backend, timeout=limit)
    context = group_context(cpu_group, device_group, device, ranks, WORLD, settings, timeout_s)
    hosts = context.exchange("tell host names", socket.gethostname())
    return Launch(place, device, settings, context, tuple(hosts))
