"""Rows of the table: each start of a configuration beside the start of SGLang alone with the same number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.e2e.configurations import CONFIGURATIONS, NATIVE, Configuration
from benchmarks.e2e.requests import GPU_DECODE
from benchmarks.e2e.run import Outcome, Start, unit_of
from benchmarks.e2e.tokens import compare, largest_shift
from benchmarks.figures import Bar, Figure

REFERENCE = "SGLang alone"
LARGEST_READY_DELAY_S = 5.0
LEAST_OPERATORS = 5
# Whatever is neither decode nor prefill at temperature 0 is shown without a bar.
BARRED = ("decode", "prefill", GPU_DECODE)


def figures(outcome: Outcome) -> list[Figure]:
    """All rows that the starts allow; a start without its partner gives none."""
    native = outcome.of(NATIVE)
    rows: list[Figure] = []
    for configuration in CONFIGURATIONS.values():
        starts = outcome.of(configuration.name)
        pairs = [(starts[number], native[number]) for number in starts if number in native]
        if configuration.name != NATIVE and pairs:
            rows += _times(configuration, pairs)
            rows += _lost_graphs(configuration.name, pairs)
            rows += _token_rows(configuration.name, pairs)
            rows += _ready(configuration, pairs)
        rows += [_operators(start) for start in starts.values() if start.recorded or "recording" in start.step.name]
    repeated = [(start, native[min(native)]) for number, start in native.items() if number != min(native)]
    if repeated:
        differing = [float(len(compare(first.answers, start.answers))) for start, first in repeated]
        rows.append(Figure("tokens of native itself, prompts that differ from its first start", "prompts", differing))
    return rows + [row for start in outcome.starts if start.step.is_control for row in _controls(start, outcome)]


def absent(outcome: Outcome) -> dict[str, str]:
    """Rows that were wanted, and why a start has no samples for them, or native's has none."""
    native = outcome.of(NATIVE)
    found: dict[str, str] = {}
    for start in outcome.starts:
        name, number = start.step.configuration.name, start.step.number
        if name == NATIVE or start.step.is_control:
            continue
        reasons = dict(start.absent)
        if number in native:
            missing = {row: why for row, why in native[number].absent.items() if row in start.samples}
            reasons |= {row: f"{REFERENCE}: {why}" for row, why in missing.items()}
        found |= {workload.format(name): reason for workload, reason in reasons.items()}
    return found


def differences(outcome: Outcome) -> dict[str, list[dict[str, Any]]]:
    """By start, each prompt's first difference from native, for the record."""
    native = outcome.of(NATIVE)
    return {
        start.step.name: [
            {**asdict(difference), "is_open": difference.is_open}
            for difference in compare(native[start.step.number].answers, start.answers)
        ]
        for start in outcome.starts
        if start.step.number in native
    }


def _times(configuration: Configuration, pairs: Sequence[tuple[Start, Start]]) -> list[Figure]:
    rows = []
    for workload in dict.fromkeys(name for start, _ in pairs for name in start.samples):
        having = [pair for pair in pairs if all(workload in start.samples for start in pair)]
        if not having:
            continue
        samples = [sample for start, _ in having for sample in start.samples[workload]]
        reference = [sample for _, start in having for sample in start.samples[workload]]
        is_barred = configuration.bar is not None and workload.startswith(BARRED)
        bar = Bar.ratio_at_most(configuration.bar) if is_barred and configuration.bar is not None else None
        name, unit = workload.format(configuration.name), unit_of(workload)
        rows.append(Figure(name, unit, samples, reference, REFERENCE, bar))
    return rows


def _lost_graphs(name: str, pairs: Sequence[tuple[Start, Start]]) -> list[Figure]:
    """A row that is absent because the plugin took SGLang's graphs away must not pass for one that cannot be."""
    lost = Counter(workload for start, native in pairs for workload in start.absent if workload in native.samples)
    return [
        Figure(
            f"{workload.format(name)}: starts without a graph where native has one",
            "starts",
            [float(count)],
            bar=Bar.at_most(0),
        )
        for workload, count in lost.items()
    ]


def _token_rows(name: str, pairs: Sequence[tuple[Start, Start]]) -> list[Figure]:
    found = [compare(native.answers, start.answers) for start, native in pairs]
    wrong = [float(sum(not difference.is_open for difference in each)) for each in found]
    differing = [float(len(each)) for each in found]
    shifts = [largest_shift(native.answers, start.answers) for start, native in pairs]
    return [
        Figure(
            f"tokens equal {name}, prompts that differ though native's logits decide",
            "prompts",
            wrong,
            bar=Bar.at_most(0),
        ),
        Figure(f"tokens of {name}, prompts that differ at all", "prompts", differing),
        Figure(f"logits of {name}, largest shift of a top logit", "of the larger", shifts),
    ]


def _ready(configuration: Configuration, pairs: Sequence[tuple[Start, Start]]) -> list[Figure]:
    """The first round of a call may find nothing in the caches of files and of Triton."""
    first: dict[int, int] = {}
    for start, _ in pairs:
        first[start.call] = min(start.step.number, first.get(start.call, start.step.number))
    warm = [pair for pair in pairs if pair[0].step.number > first[pair[0].call]]
    if not warm or not configuration.layers or not configuration.is_timed:
        return []
    samples, reference = [start.ready_s for start, _ in warm], [native.ready_s for _, native in warm]
    bar = Bar.difference_at_most(LARGEST_READY_DELAY_S)
    return [
        Figure(f"server ready with the plugin, warm, {configuration.name}", "s", samples, reference, REFERENCE, bar)
    ]


def _operators(start: Start) -> Figure:
    missing = max(0.0, float(LEAST_OPERATORS - len(start.recorded)))
    return Figure(
        f"ATen operators that ran on FlagGems, fewer than {LEAST_OPERATORS}", "operators", [missing], bar=Bar.at_most(0)
    )


def _controls(start: Start, outcome: Outcome) -> list[Figure]:
    """A fault that is on must be found by the same comparison that finds the plugin right; one that is off must not."""
    native = outcome.of(NATIVE).get(start.step.number)
    if native is None:
        return []
    rows = []
    for fault, answers in {"none": start.answers, **start.switched}.items():
        found = compare(native.answers, answers)
        is_seen = any(not difference.is_open for difference in found)
        if fault == "none":
            rows.append(Figure("control: no fault is on, but one is seen", "", [float(is_seen)], bar=Bar.at_most(0)))
        else:
            name = f"control: a fault in {fault} ({start.places[fault]}) is not seen"
            rows.append(Figure(name, "", [float(not is_seen)], bar=Bar.at_most(0)))
    return rows


__all__ = ["absent", "differences", "figures"]
