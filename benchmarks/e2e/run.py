"""Starts servers in turn, measures each, and keeps what came of it until the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE, Configuration
from benchmarks.e2e.requests import Sizes, answers, workloads
from benchmarks.e2e.server_plugin.controls import OFF
from benchmarks.e2e.servers import Site
from benchmarks.e2e.tokens import Answer, weakness
from sglang_fl.testing.server import Server, ServerError

CONTROLS = "controls"
READY_LIMIT_S = 300.0
# Before one of its kind was seen: enough that a start is not begun which cannot end.
FIRST_START_S = 60.0


@dataclass(frozen=True)
class Step:
    """One start of a server."""

    configuration: Configuration
    number: int
    is_control: bool = False

    @property
    def name(self) -> str:
        """Of its log."""
        return f"{self.number}-{self.configuration.name}" + (f"-{CONTROLS}" if self.is_control else "")


@dataclass(frozen=True)
class Plan:
    """What is started.

    Attributes:
        configurations: in each of the ``starts`` rounds, in this order.
        once: in the last round only, behind the others.
        controls_on: the configuration whose answers the controls must change; None: no controls.
        repeats: samples of each row and start.
    """

    configurations: tuple[str, ...]
    once: tuple[str, ...] = ()
    starts: int = 3
    repeats: int = 5
    controls_on: str | None = None

    def rounds(self) -> Iterator[list[Step]]:
        """The starts that are compared to each other's times; at the end the controls, which have none, alone."""
        for number in range(self.starts):
            names = (*self.configurations, *(self.once if number == self.starts - 1 else ()))
            yield [Step(CONFIGURATIONS[name], number) for name in names]
        if self.controls_on is not None:
            yield [Step(CONFIGURATIONS[self.controls_on], self.starts - 1, is_control=True)]

    def steps(self) -> Iterator[Step]:
        """All starts in their order."""
        for steps in self.rounds():
            yield from steps


@dataclass
class Start:
    """What one start gave.

    Attributes:
        samples: ms by the name of the workload.
        switched: of a control run, the answers by the fault that was on.
        places: of a control run, where each fault is.
        weights: digests by rank and name.
        recorded: how often each ATen operator ran on FlagGems, where that was recorded.
        call: of the program, by which it was made; the first is 1.
    """

    step: Step
    ready_s: float
    answers: list[Answer]
    samples: dict[str, list[float]] = field(default_factory=dict)
    switched: dict[str, list[Answer]] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    recorded: Mapping[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    command: str = ""
    took_s: float = 0.0
    call: int = 1


@dataclass
class Outcome:
    """What a run gave, and what it did not."""

    starts: list[Start] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)

    def of(self, configuration: str, is_control: bool = False) -> dict[int, Start]:
        """A configuration's starts by their number."""
        wanted = (configuration, is_control)
        return {
            start.step.number: start
            for start in self.starts
            if (start.step.configuration.name, start.step.is_control) == wanted
        }


def run(
    plan: Plan,
    site: Site,
    sizes: Sizes,
    limit_s: float,
    tell: Callable[[str], None],
    keep: Callable[[Outcome], None],
    kept: Sequence[Start] = (),
    call: int = 1,
) -> Outcome:
    """Make the starts one after another, each with the GPUs to itself.

    A server that does not come up, or is not what it should be, is a failure that ends nothing but itself.

    Args:
        plan: what is started.
        site: where.
        sizes: how much is asked.
        limit_s: no start is begun that would end later, as long as the longest before it taken.
        tell: is given a line for each start.
        keep: is given what there is after each start and at the end.
        kept: starts of earlier calls, which are not made again.
        call: the number of this one.
    """
    outcome, began = Outcome(list(kept)), time.monotonic()
    longest = max([FIRST_START_S, *(start.took_s for start in kept)])
    order = {step.name: place for place, step in enumerate(plan.steps())}
    by_name = {start.step.name: start for start in kept}
    for step in plan.steps():
        if step.name in by_name:
            tell(f"{step.name}: kept, made by call {by_name[step.name].call}")
            continue
        left_s = limit_s - (time.monotonic() - began)
        if outcome.not_run or left_s < longest:
            outcome.not_run.append(step.name)
            continue
        start_s = time.monotonic()
        try:
            site.wait_until_free()
            start = _measure(step, plan, site, sizes, min(READY_LIMIT_S, left_s))
            _require_same_weights(start, outcome)
        except ServerError as error:
            outcome.failures[step.name] = str(error)
            tell(f"{step.name}: FAILED: {error}")
        else:
            start.took_s, start.call = time.monotonic() - start_s, call
            outcome.starts.append(start)
            outcome.starts.sort(key=lambda each: order[each.step.name])
            medians = ", ".join(f"{sorted(each)[len(each) // 2]:.3f}" for each in start.samples.values())
            tell(f"{step.name}: ready after {start.ready_s:.1f} s, {start.took_s:.0f} s in all; ms {medians or '-'}")
        longest = max(longest if outcome.starts else 0.0, time.monotonic() - start_s)
        keep(outcome)
    keep(outcome)
    return outcome


def _measure(step: Step, plan: Plan, site: Site, sizes: Sizes, limit_s: float) -> Start:
    switch = site.folder / f"{step.name}.switch" if step.is_control else None
    with site.server(step.configuration, step.name, limit_s, switch) as server:
        found = site.check(server, step.configuration)
        samples = {}
        if step.configuration.is_timed and not step.is_control:
            samples = _samples(server, plan.repeats, sizes)
        start = Start(step, server.ready_after_s, answers(server, sizes), samples)
        start.command, start.lines = server.shell_command(), found["lines"]
        start.weights = {
            rank: {name: weight["digest"] for name, weight in each["weights"].items()}
            for rank, each in found["reports"].items()
        }
        if switch is not None:
            start.places = found["reports"][0]["controls"]
            start.switched = {fault: _answers_under(server, switch, fault, sizes) for fault in start.places}
    problem = weakness(start.answers)
    if problem:
        raise ServerError(f"{step.name}: {problem}: its answers prove nothing")
    recorded = site.recorded_path(step.name)
    if recorded.exists():
        start.recorded = count_operators(recorded)
    return start


def _require_same_weights(start: Start, outcome: Outcome) -> None:
    """Else tokens could not be compared."""
    if not outcome.starts or start.weights == outcome.starts[0].weights:
        return
    expected = outcome.starts[0].weights
    names = {
        name for rank in expected for name, digest in expected[rank].items() if start.weights[rank].get(name) != digest
    }
    raise ServerError(
        f"{start.step.name}: {len(names)} weights are not those of {outcome.starts[0].step.name}, such as "
        f"{min(names, default='none')}: answers cannot be compared"
    )


def _samples(server: Server, repeats: int, sizes: Sizes) -> dict[str, list[float]]:
    timed = list(workloads(sizes))
    for workload in timed:
        workload.warm_up(server)
    samples: dict[str, list[float]] = {workload.name: [] for workload in timed}
    for _ in range(repeats):
        for workload in timed:
            samples[workload.name].append(workload.sample(server))
    return samples


def _answers_under(server: Server, switch: Path, fault: str, sizes: Sizes) -> list[Answer]:
    try:
        _write(switch, fault)
        return answers(server, sizes)
    finally:
        _write(switch, OFF)


def _write(switch: Path, fault: str) -> None:
    partial = switch.with_name(f"{switch.name}.partial")
    partial.write_text(fault)
    partial.rename(switch)


def count_operators(path: Path) -> dict[str, int]:
    """How often each function is in layer 1's record, ``[DEBUG] flag_gems.ops.cumsum.cumsum: ...``; the most first."""
    counts: dict[str, int] = {}
    for line in path.read_text().splitlines():
        parts = line.split()
        if len(parts) > 1 and parts[0].startswith("["):
            name = parts[1].rstrip(":")
            counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def describe(outcome: Outcome) -> dict[str, Any]:
    """All of it for the record, but the logits of equal tokens."""
    return {
        "starts": [
            {
                "name": start.step.name,
                "configuration": start.step.configuration.name,
                "ready_s": start.ready_s,
                "took_s": start.took_s,
                "call": start.call,
                "samples": start.samples,
                "tokens": [list(answer.ids) for answer in start.answers],
                "controls": dict(start.places),
                "operators": dict(start.recorded),
                "plugin": start.lines,
                "command": start.command,
            }
            for start in outcome.starts
        ],
        "failed": outcome.failures,
        "not_run": outcome.not_run,
    }


__all__ = ["NATIVE", "Outcome", "Plan", "Start", "Step", "count_operators", "describe", "run"]
