"""Reads what SGLANG_FL_COMM_AUDIT wrote, and says which scheduler processes of a server the plugin is not active in."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_fl.testing.server import Server

VARIABLE = "SGLANG_FL_COMM_AUDIT"


class AuditError(AssertionError):
    """The plugin is not active in a scheduler process, or its counts did not reach what was expected."""


@dataclass(frozen=True)
class GroupAudit:
    """One group as one process reports it: calls by method since the start."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    calls: Counter[str]


@dataclass(frozen=True)
class ProcessAudit:
    """One scheduler process as it reports itself.

    rank: its global rank; carried: by group and backend, how many calls a library got.
    """

    pid: int
    rank: int
    hooks: int
    hooks_live: int
    groups: tuple[GroupAudit, ...]
    carried: Counter[tuple[str, str]]

    @property
    def shared_groups(self) -> list[GroupAudit]:
        """The groups of more than one rank."""
        return [group for group in self.groups if len(group.ranks) > 1]

    def calls(self) -> Counter[str]:
        """Calls by method, over all groups."""
        return sum((group.calls for group in self.groups), Counter())


def audit_path(path: Path, rank: int) -> Path:
    """The file of a global rank where the variable is ``path``."""
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def read_audit(path: Path) -> ProcessAudit:
    """One process's file."""
    found = json.loads(path.read_text())
    groups = tuple(
        GroupAudit(group["group"], tuple(group["ranks"]), group["backend"], Counter(group["calls"]))
        for group in found["groups"]
    )
    carried: Counter[tuple[str, str]] = Counter()
    for row in (found["clock"] or {"carried": []})["carried"]:
        carried[row["group"], row["backend"]] += row["calls"]
    return ProcessAudit(found["pid"], found["rank"], found["hooks"], found["hooks_live"], groups, carried)


def read_audits(path: Path, world_size: int) -> list[ProcessAudit]:
    """The files that are there, in the order of the ranks."""
    files = (audit_path(path, rank) for rank in range(world_size))
    return [read_audit(file) for file in files if file.exists()]


def inactive(server: Server, audits: list[ProcessAudit]) -> list[str]:
    """For each scheduler process in which the plugin is not active, and each that is missing, one sentence."""
    schedulers = {process.pid: process.name() for process in server.schedulers()}
    by_pid = {audit.pid: audit for audit in audits}
    problems = [
        f"{name} (pid {pid}): no report from the plugin" for pid, name in schedulers.items() if pid not in by_pid
    ]
    problems += [
        f"rank {audit.rank} (pid {audit.pid}): {audit.hooks_live} of {audit.hooks} hooks are live"
        for audit in audits
        if audit.hooks_live != audit.hooks or audit.hooks == 0
    ]
    problems += [
        f"rank {a.rank}: pid {a.pid} is no scheduler of this server" for a in audits if a.pid not in schedulers
    ]
    if len(schedulers) != server.world_size:
        problems.append(f"{len(schedulers)} scheduler processes run, {server.world_size} are expected")
    return problems


def settled_audits(path: Path, world_size: int) -> list[ProcessAudit]:
    """The reports of a server that is asked nothing, once no call has been added for 1.5 seconds; waits 20 at most."""
    until = time.monotonic() + 20.0
    audits, since = read_audits(path, world_size), time.monotonic()
    while time.monotonic() - since < 1.5 and time.monotonic() < until:
        time.sleep(0.1)
        newer = read_audits(path, world_size)
        if newer != audits:
            audits, since = newer, time.monotonic()
    return audits


def wait_for(path: Path, world_size: int, is_enough: Callable[[list[ProcessAudit]], bool]) -> list[ProcessAudit]:
    """Read until ``is_enough`` of the reports holds: they are written twice a second.

    Raises:
        AuditError: it did not hold within 20 seconds; with the last reports.
    """
    until = time.monotonic() + 20.0
    while True:
        audits = read_audits(path, world_size)
        if len(audits) == world_size and is_enough(audits):
            return audits
        if time.monotonic() > until:
            raise AuditError(f"what {VARIABLE}={path} reports did not become what was expected: {audits}")
        time.sleep(0.1)
