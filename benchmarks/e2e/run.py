"""Starts servers in turn, measures each, and keeps what came of it until the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE, Configuration
from benchmarks.e2e.graphs import GraphStep, graph_steps
from benchmarks.e2e.requests import GPU_DECODE, Sizes, Workload, answers, workloads
from benchmarks.e2e.server_plugin.controls import OFF
from benchmarks.e2e.servers import Share, Site
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
        tries: requests of which the fastest is a sample.
        is_together: the servers of a round run at the same time and are asked in turns, so that whatever the machine
            does meanwhile falls on all of them; else each has the GPUs to itself.
    """

    configurations: tuple[str, ...]
    once: tuple[str, ...] = ()
    starts: int = 3
    repeats: int = 5
    controls_on: str | None = None
    is_together: bool = False
    tries: int = 1

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

    def batches(self) -> Iterator[list[Step]]:
        """The starts whose servers run at the same time."""
        for steps in self.rounds():
            if self.is_together:
                yield steps
            else:
                yield from ([step] for step in steps)


@dataclass
class Start:
    """What one start gave.

    Attributes:
        samples: by the name of the workload, ms, or us of the GPU.
        absent: why there are none, by the name of the workload.
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
    absent: dict[str, str] = field(default_factory=dict)
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
    """Make the starts one after another, each with the GPUs to itself, or those of a round at the same time.

    A server that does not come up, or is not what it should be, is a failure that ends nothing but itself, and what
    was to run at the same time.

    Args:
        plan: what is started.
        site: where.
        sizes: how much is asked.
        limit_s: nothing is begun that would end later if it took as long as the longest before it. The first, which may
            find nothing in the caches of files and of Triton, counts only for the second.
        tell: is given a line for each start.
        keep: is given what there is after each start and at the end.
        kept: starts of earlier calls, which are not made again.
        call: the number of this one.
    """
    outcome, began = Outcome(list(kept)), time.monotonic()
    took_s: list[float] = []
    longest = max([FIRST_START_S, *(start.took_s for start in kept)])
    order = {step.name: place for place, step in enumerate(plan.steps())}
    by_name = {start.step.name: start for start in kept}
    for steps in plan.batches():
        names = [step.name for step in steps]
        if all(name in by_name for name in names):
            for name in names:
                tell(f"{name}: kept, made by call {by_name[name].call}")
            continue
        left_s = limit_s - (time.monotonic() - began)
        if outcome.not_run or left_s < longest:
            outcome.not_run += names
            continue
        start_s = time.monotonic()
        try:
            site.wait_until_free()
            starts = _measure(steps, plan, site, sizes, min(READY_LIMIT_S, left_s))
            for start in starts:
                _require_same_weights(start, [*outcome.starts, *starts])
        except ServerError as error:
            for name in names:
                outcome.failures[name] = str(error)
                tell(f"{name}: FAILED: {error}")
        else:
            for start in starts:
                start.took_s, start.call = time.monotonic() - start_s, call
                tell(_in_words(start))
            outcome.starts += starts
            outcome.starts.sort(key=lambda each: order[each.step.name])
        took_s.append(time.monotonic() - start_s)
        longest = max(took_s[1:] or took_s)
        keep(outcome)
    keep(outcome)
    return outcome


def _in_words(start: Start) -> str:
    medians: dict[str, list[str]] = {"ms": [], "us": []}
    for name, each in start.samples.items():
        medians[unit_of(name)].append(f"{sorted(each)[len(each) // 2]:.3f}")
    times = "; ".join(f"{unit} {', '.join(each)}" for unit, each in medians.items() if each)
    return f"{start.step.name}: ready after {start.ready_s:.1f} s, {start.took_s:.0f} s in all; {times or 'not timed'}"


def _measure(steps: Sequence[Step], plan: Plan, site: Site, sizes: Sizes, limit_s: float) -> list[Start]:
    """Start the servers of ``steps`` one after another, and ask all of them in turns; they end together."""
    ends_s = time.monotonic() + limit_s
    with ExitStack() as stack:
        servers, starts = [], []
        for place, step in enumerate(steps):
            switch = _switch(step, site)
            share = Share(place, len(steps))
            left_s = ends_s - time.monotonic()
            server = stack.enter_context(site.server(step.configuration, step.name, left_s, switch, share))
            starts.append(_described(step, server, site.check(server, step.configuration)))
            servers.append(server)
        measured = [place for place, step in enumerate(steps) if not step.is_control]
        for place in measured:
            # Those that only record what ran are asked for the same.
            for workload in workloads(sizes):
                workload.warm_up(servers[place])
        timed = [place for place in measured if steps[place].configuration.is_timed]
        found = _samples([servers[place] for place in timed], list(workloads(sizes)), plan)
        for place, samples in zip(timed, found, strict=True):
            starts[place].samples = samples
        for server, start in zip(servers, starts, strict=True):
            start.answers = answers(server, sizes)
        # After all answers: what a replay may change is nobody's any more.
        _add_graph_times([(servers[place], starts[place]) for place in timed], plan, site, sizes)
        for server, start in zip(servers, starts, strict=True):
            switch = _switch(start.step, site)
            if switch is not None:
                start.switched = {fault: _answers_under(server, switch, fault, sizes) for fault in start.places}
    for start in starts:
        problem = weakness(start.answers)
        if problem:
            raise ServerError(f"{start.step.name}: {problem}: its answers prove nothing")
        recorded = site.recorded_path(start.step.name)
        if recorded.exists():
            start.recorded = count_operators(recorded)
    return starts


def _switch(step: Step, site: Site) -> Path | None:
    return site.folder / f"{step.name}.switch" if step.is_control else None


def _described(step: Step, server: Server, found: Mapping[str, Any]) -> Start:
    """What is known of it before anything is asked."""
    start = Start(step, server.ready_after_s, [], command=server.shell_command(), lines=found["lines"])
    start.weights = {
        rank: {name: weight["digest"] for name, weight in each["weights"].items()}
        for rank, each in found["reports"].items()
    }
    if step.is_control:
        start.places = found["reports"][0]["controls"]
    return start


def _require_same_weights(start: Start, starts: Sequence[Start]) -> None:
    """As the first of ``starts``; else tokens could not be compared."""
    expected = starts[0].weights
    if start.weights == expected:
        return
    names = {
        name for rank in expected for name, digest in expected[rank].items() if start.weights[rank].get(name) != digest
    }
    raise ServerError(
        f"{start.step.name}: {len(names)} weights are not those of {starts[0].step.name}, such as "
        f"{min(names, default='none')}: answers cannot be compared"
    )


def _samples(
    servers: Sequence[Server], timed: Sequence[Workload | GraphStep], plan: Plan
) -> list[dict[str, list[float]]]:
    """By the name of the workload, of each server; they are asked in turns forwards and backwards."""
    samples: list[dict[str, list[float]]] = [{workload.name: [] for workload in timed} for _ in servers]
    for number in range(plan.repeats):
        for workload in timed:
            for place in range(len(servers))[:: 1 if number % 2 == 0 else -1]:
                samples[place][workload.name].append(workload.sample(servers[place], plan.tries))
    return samples


def _add_graph_times(measured: Sequence[tuple[Server, Start]], plan: Plan, site: Site, sizes: Sizes) -> None:
    """The GPU's times of the servers that have graphs, in turns as the others; of all others why there are none."""
    for step in graph_steps(sizes):
        having = []
        for server, start in measured:
            reason = site.why_no_graph_time() or step.warm_up(server)
            if reason:
                start.absent[step.name] = reason
            else:
                having.append((server, start))
        for (_, start), samples in zip(having, _samples([server for server, _ in having], [step], plan), strict=True):
            start.samples |= samples


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


def unit_of(workload: str) -> str:
    """Of its samples."""
    return "us" if workload.startswith(GPU_DECODE) else "ms"


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
                "absent": start.absent,
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


__all__ = ["NATIVE", "Outcome", "Plan", "Start", "Step", "count_operators", "describe", "run", "unit_of"]
