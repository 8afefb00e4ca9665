"""Goes on from an earlier call: whole rounds of its starts are kept, so that native and plugin are of the same call.

Beside the record each start has a file, ``NAME.start.json``, with its logits, which the record has not; the record has
the file's digest.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.e2e.options import broken_record, other_commit, read_record
from benchmarks.e2e.run import Outcome, Plan, Start, Step
from benchmarks.e2e.tokens import Answer

# Attributes of a start that are written as they are.
_PLAIN = ("ready_s", "samples", "absent", "places", "recorded", "lines", "command", "took_s", "call")


@dataclass(frozen=True)
class Earlier:
    """What the record says of the run that wrote it.

    Attributes:
        commit: of the checkout.
        run: arguments that matter and the machine, as :func:`describe_run` gives them.
        calls: of the program, each with what it made.
        digests: of the files of starts that ended well, by the start's name.
    """

    commit: str
    run: Mapping[str, Any]
    calls: Sequence[Mapping[str, Any]]
    digests: Mapping[str, str]

    def refusal(self, run: Mapping[str, Any], commit: str) -> str:
        """Why nothing of it can be kept; empty if it can."""
        differing = [name for name in run if self.run.get(name) != run[name]]
        if differing:
            return f"the record is of another run, with other {', '.join(differing)}"
        return other_commit(self.commit, commit)


@dataclass
class Kept:
    """Starts that are not made again, the calls that made them, and in words what was not kept."""

    starts: list[Start] = field(default_factory=list)
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


def read(path: Path) -> Earlier | None:
    """The record that a call wrote; None where there is none.

    Raises:
        OptionError: it is no record.
    """
    content = read_record(path)
    if content is None:
        return None
    try:
        return Earlier(
            str(content["commit"]),
            dict(content.get("run", {})),
            [{**call} for call in content.get("calls", ())],
            {str(name): str(digest) for name, digest in content.get("digests", {}).items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise broken_record(path, error) from error


def describe_run(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What two calls must have in common: ``arguments``, as JSON gives them back, and the machine, without its name."""
    machine = hashlib.sha256(platform.node().encode()).hexdigest()[:12]
    found: dict[str, Any] = json.loads(json.dumps({**arguments, "machine": machine}))
    return found


def keep(earlier: Earlier | None, run: Mapping[str, Any], commit: str, plan: Plan, folder: Path) -> Kept:
    """The rounds of ``plan`` of which one earlier call made every start; the controls are a round of their own."""
    why = "there is no record yet" if earlier is None else earlier.refusal(run, commit)
    if earlier is None or why:
        return Kept(words=[f"--resume: nothing is kept: {why}"])
    kept = Kept(calls=list(earlier.calls))
    for steps in plan.rounds():
        found = {}
        for step in steps:
            if step.name not in earlier.digests:
                continue
            try:
                found[step.name] = load(step, folder, earlier.digests[step.name])
            except (OSError, ValueError) as error:
                kept.words.append(f"--resume: {step.name} is not kept: {error}")
        missing = [step.name for step in steps if step.name not in found]
        if not missing and len({start.call for start in found.values()}) == 1:
            kept.starts += found.values()
        elif found:
            why = f"without {', '.join(missing)}" if missing else "made by several calls"
            kept.words.append(f"--resume: {', '.join(found)} will be made again: a round {why}")
    return kept


def describe_calls(
    outcome: Outcome, earlier: Sequence[Mapping[str, Any]], this: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """For the record: every call with what it made that is still there, what failed in it and what it left."""
    now = {
        **this,
        "failed": {name: error.splitlines()[0] for name, error in outcome.failures.items()},
        "not_run": list(outcome.not_run),
    }
    made = _made(outcome)
    return [{**call, "made": made.get(number, [])} for number, call in enumerate((*earlier, now), 1)]


def in_words(outcome: Outcome) -> str:
    """Which call made what; empty where one made all."""
    made = _made(outcome)
    each = (f"call {call}: {', '.join(names)}" for call, names in sorted(made.items()))
    return f"made in {len(made)} calls: {'; '.join(each)}" if len(made) > 1 else ""


def _made(outcome: Outcome) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for start in outcome.starts:
        found.setdefault(start.call, []).append(start.step.name)
    return found


def save(start: Start, folder: Path) -> str:
    """Write the start's file; its digest."""
    content = {
        **{name: getattr(start, name) for name in _PLAIN},
        "answers": [asdict(answer) for answer in start.answers],
        "switched": {fault: [asdict(answer) for answer in answers] for fault, answers in start.switched.items()},
        "weights": start.weights,
    }
    text = json.dumps(content).encode()
    _place(start.step, folder).write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def load(step: Step, folder: Path, digest: str) -> Start:
    """The start whose file :func:`save` wrote.

    Raises:
        OSError: it cannot be read; ValueError: it is not the one of ``digest``.
    """
    path = _place(step, folder)
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != digest:
        raise ValueError(f"{path} is not the file that the record names by its digest")
    content = json.loads(text)
    return Start(
        step,
        answers=_answers(content["answers"]),
        switched={fault: _answers(answers) for fault, answers in content["switched"].items()},
        weights={int(rank): digests for rank, digests in content["weights"].items()},
        **{name: content[name] for name in _PLAIN},
    )


def _answers(content: Sequence[Mapping[str, Any]]) -> list[Answer]:
    return [
        Answer(tuple(each["ids"]), [{int(token): logit for token, logit in top.items()} for top in each["tops"]])
        for each in content
    ]


def _place(step: Step, folder: Path) -> Path:
    return folder / f"{step.name}.start.json"
