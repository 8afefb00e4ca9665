"""The bisection: native, everything, then by halves the layer and the operator; every start is asked the same."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_fl.bisect.aten_names import chosen_names
from sglang_fl.bisect.comparison import Comparison, Outcome, Tolerance, compare, tolerance_of
from sglang_fl.bisect.evidence import AUDIT_SETTLES_S, Files, LayerStates, layer_states, needs_plugin
from sglang_fl.bisect.parts import (
    AS_CONFIGURED,
    LAYERS,
    LAYERS_OFF,
    NATIVE,
    OTHER_OPERATIONS,
    ROUTED,
    Configured,
    Part,
    Setup,
    Variables,
)
from sglang_fl.bisect.questions import NEW_TOKENS, PROMPTS, AnswerError, Answers, ask, sequences_of
from sglang_fl.bisect.search import first_bad, most_asked
from sglang_fl.bisect.server import LaunchedServer
from sglang_fl.testing.server import ServerError


@dataclass(frozen=True)
class Options:
    """What the user chooses.

    arguments: of ``sglang.launch_server``. folder: for logs and scripts. ready_limit_s: how long a server
    may take to get ready, and to give an answer. limit: the tolerance in place of the measured one.
    """

    arguments: tuple[str, ...]
    folder: Path
    ready_limit_s: float = 600.0
    prompts: tuple[str, ...] = PROMPTS
    new_tokens: int = NEW_TOKENS
    limit: float | None = None


@dataclass(frozen=True)
class Trial:
    """One start, done.

    label: names its files. environment: what it changed. tail: the last lines of the log of one that failed.
    """

    setup: Setup
    label: str
    environment: Variables
    comparison: Comparison
    tail: str = ""


@dataclass(frozen=True)
class Verdict:
    """What was found.

    part: the layer that differs, None if nothing does. item: operator, ATen operator or operation of it; "" where
    settings cannot separate further. sentences: for people.
    """

    part: Part | None
    item: str
    sentences: tuple[str, ...]


# Items: four kinds of collectives; classes that the bridges know; FlagGems' list, without records of what ran.
STARTS = (
    f"2 starts if nothing differs; otherwise at most {most_asked(1 + len(LAYERS))} more for the layer, then for the "
    f"operator {most_asked(4) + 1} (layer 3), up to {most_asked(16) + 1} (layer 2) or {most_asked(512) + 1} (layer 1)"
)


class CannotRunError(RuntimeError):
    """There is nothing to compare with."""


class Listener:
    """Is told what happens; a terminal or a plain log derives from it. Nothing by default."""

    def say(self, text: str) -> None:
        """A line."""

    def begin(self, title: str, server: LaunchedServer) -> None:
        """A start begins."""

    def waiting(self, lines: list[str]) -> None:
        """While a server is not ready: the new lines of its log."""

    def end(self, trial: Trial) -> None:
        """A start is done."""


@dataclass
class Bisection:
    """One run; :meth:`find` does it. ``trials`` has every start so far, the first is the baseline."""

    options: Options
    configured: Configured
    listener: Listener = field(default_factory=Listener)
    trials: list[Trial] = field(default_factory=list)
    tolerance: Tolerance | None = None
    _native: Answers | None = None
    _states: LayerStates | None = None
    _files: Files | None = None

    def find(self) -> Verdict:
        """Start servers until the first layer and operator that differ are known.

        Raises:
            CannotRunError: no baseline could be started, or it differs from itself. The layers off are the baseline
            only where SGLang alone lacks a device or kernels.
        """
        say = self.listener.say
        say(STARTS)
        base = self._baseline()
        assert self.tolerance is not None
        say(self.tolerance.describe())
        whole = self._try(AS_CONFIGURED)
        if whole.comparison.outcome.is_good:
            return Verdict(None, "", self._nothing(whole))
        steps = self._steps(base)
        if whole.comparison.outcome is Outcome.FAILED:
            say("the server fails with everything on; what makes it fail is looked for in the same way")
        if not steps:
            raise CannotRunError(
                "no layer is on, and yet the second start differs from the first: the server does not give the same "
                "answers twice"
            )
        names = ", ".join(_short(step) for step in steps)
        say(f"at most {most_asked(len(steps))} more starts for the layer, of {names}")
        place = first_bad(len(steps), lambda count: self._is_good(self._with_steps(steps[:count], base)))
        return self._within(steps[place], (*base.parts, *steps[:place]))

    def _baseline(self) -> Setup:
        for setup in (NATIVE, LAYERS_OFF):
            trial, answers = self._start(setup)
            if answers is not None:
                self._native = answers
                self.tolerance = tolerance_of(answers, self.options.limit)
                self._end(trial)
                return setup
            self._end(trial)
            if setup is NATIVE:
                self._require_need_of_plugin(trial)
        raise CannotRunError(
            "the server runs neither without the plugin nor with all layers off: nothing to compare with"
        )

    def _require_need_of_plugin(self, native: Trial) -> None:
        reason = needs_plugin((self.options.folder / f"{native.label}.log").read_text(errors="replace"))
        if not reason:
            raise CannotRunError(
                f"SGLang alone, without the plugin, does not serve with these arguments: {native.comparison.first}. "
                "Nothing to compare with: the last lines of its log are above, start it by hand until it serves"
            )
        self.listener.say(f"SGLang alone does not run here ({reason}): the plugin with all layers off takes its place")

    def _steps(self, base: Setup) -> list[Part]:
        """What is added to the baseline one after the other, without layers that were off."""
        states = self._states
        assert states is not None
        # A server that failed early has not told everything: what it did not call off may have been on.
        active = states.active if self._was_ready() else states.not_off
        for layer in LAYERS:
            if layer not in active:
                self.listener.say(f"{layer.value}: {states.reasons.get(layer, 'off')}")
        return [part for part in Part if part not in base.parts and (part is Part.PLUGIN or part in active)]

    def _was_ready(self) -> bool:
        return self.trials[-1].comparison.outcome is not Outcome.FAILED

    def _with_steps(self, steps: Sequence[Part], base: Setup) -> Setup:
        parts = (*base.parts, *steps)
        return Setup(f"with {' + '.join(map(_short, steps))}", parts)

    def _within(self, part: Part, before: tuple[Part, ...]) -> Verdict:
        """Which item of the layer it is."""
        say = self.listener.say
        say(f"the first to differ: {part.value}")
        items, assumed = self._items(part)
        if len(items) == 0:
            return Verdict(part, "", (f"{part.value} makes the difference.", *_no_items(part)))
        parts = (*before, part)
        most = most_asked(len(items), assumed) + 1
        say(f"at most {most} more starts for the operator, of {len(items)}: {_shortened(items[assumed:])}")

        def is_good(count: int) -> bool:
            chosen = tuple(items[:count])
            title = f"{_short(part)} with {count} of {len(items)}: {_shortened(chosen[-3:], chosen)}"
            return self._is_good(Setup(title, parts, part, chosen))

        item = items[first_bad(len(items), is_good, assumed)]
        rest = self._try(Setup(f"as configured, without {item}", tuple(Part), part, without=(item,)))
        return Verdict(part, item, self._found(part, item, rest))

    def _items(self, part: Part) -> tuple[list[str], int]:
        """The items of a layer that ran, and how many in front of them are taken for good as they did not."""
        files = self._files
        assert files is not None
        if part is Part.OPERATORS:
            return list(files.operators()), 0
        if part is Part.ATEN:
            return self._aten_items(files)
        if part is Part.COMMUNICATION:
            called = files.collectives()
            return [item for item in (OTHER_OPERATIONS, *ROUTED) if item in called or not called], 0
        return [], 0

    def _aten_items(self, files: Files) -> tuple[list[str], int]:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        try:
            names = chosen_names(self.options.folder / "aten_names.json", environ)
        except subprocess.TimeoutExpired:
            names = []
        if not names:
            self.listener.say(
                "FlagGems did not list its operators, see aten_names.log; the recorded ones are looked into"
            )
        recorded = [name for name in files.aten_functions() if name in names or not names]
        idle = [name for name in names if name not in recorded] if recorded else []
        return [*idle, *(recorded or names)], len(idle)

    def _is_good(self, setup: Setup) -> bool:
        return self._try(setup).comparison.outcome.is_good

    def _try(self, setup: Setup) -> Trial:
        trial, answers = self._start(setup)
        if answers is not None:
            assert self._native is not None
            assert self.tolerance is not None
            trial = replace(trial, comparison=compare(self._native, answers, self.tolerance))
        self._end(trial)
        return trial

    def _start(self, setup: Setup) -> tuple[Trial, Answers | None]:
        """Start, ask, stop. Without answers the trial says why."""
        label = f"{len(self.trials) + 1:02d}-{_slug(setup)}"
        environment = self.configured.variables(setup)
        if setup is AS_CONFIGURED:
            self._files = Files.of(self.options.folder, label)
            self._files.clear()
            environment = {**environment, **self._files.variables()}
        server = LaunchedServer(
            Path(),
            self.options.folder,
            arguments=self.options.arguments,
            environment=environment,
            ready_limit_s=self.options.ready_limit_s,
            on_wait=self.listener.waiting,
            label=label,
        )
        server.write_script()
        self.listener.begin(setup.title, server)
        answers, problem = self._ask(server, setup)
        if setup is AS_CONFIGURED:
            self._states = layer_states(server.log())
        trial = Trial(setup, label, environment, Comparison(Outcome.EQUAL, 0.0, "the baseline"))
        if answers is None:
            failed = Comparison(Outcome.FAILED, math.nan, problem)
            trial = replace(trial, comparison=failed, tail=server.last_lines())
        return trial, answers

    def _ask(self, server: LaunchedServer, setup: Setup) -> tuple[Answers | None, str]:
        forced = None if self._native is None else sequences_of(self._native.alone)
        is_ready = False

        def post(path: str, body: Mapping[str, Any]) -> Any:
            return server.post(path, body, self.options.ready_limit_s)

        try:
            with server:
                is_ready = True
                answers = ask(post, self.options.prompts, self.options.new_tokens, forced)
                if setup is AS_CONFIGURED:
                    time.sleep(AUDIT_SETTLES_S)
                return answers, ""
        except AnswerError as error:
            return None, str(error)
        except ServerError as error:
            what = "ready, but a question failed" if is_ready else _why_not_ready(str(error))
            return None, what

    def _end(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.listener.end(trial)

    def _nothing(self, whole: Trial) -> tuple[str, ...]:
        states = self._states
        assert states is not None
        on = ", ".join(layer.value for layer in states.active) or "no layer"
        if whole.comparison.outcome is Outcome.ROUNDING:
            return (f"Nothing but rounding differs with {on} on: {whole.comparison.first}.",)
        return (f"Nothing differs with {on} on.",)

    def _found(self, part: Part, item: str, rest: Trial) -> tuple[str, ...]:
        without = " ".join(f"{name}={value}" for name, value in rest.environment.items() if value is not None)
        named = f"{part.value}: {item}{self._where(part, item)} makes the difference."
        if rest.comparison.outcome.is_good:
            return (named, f"With everything else on nothing differs: serve with {without}.")
        return (
            named,
            f"Without it something else differs too, or it is not the only one: run bisect again with {without}.",
        )

    def _where(self, part: Part, item: str) -> str:
        assert self._files is not None
        if part is Part.OPERATORS:
            return f", which ran on {self._files.operators().get(item, 'an implementation that the log does not name')}"
        if part is Part.COMMUNICATION:
            groups = self._files.collectives().get(item, [])
            return f", called by {', '.join(groups)}," if groups else ""
        return ""


def _no_items(part: Part) -> tuple[str, ...]:
    if part is Part.PLUGIN:
        return (
            "All layers were off: it is what the plugin gives SGLang as a platform, such as the attention backend. "
            "Compare the server_args= line of the first two logs.",
        )
    return ("Nothing of it was recorded, so settings cannot separate it further; its start's log tells more.",)


def _why_not_ready(text: str) -> str:
    """The sentence of the error behind the command."""
    lines = text.splitlines()
    return lines[1].partition(";")[0] if len(lines) > 1 else text


def _short(part: Part) -> str:
    return "the plugin" if part is Part.PLUGIN else part.value.partition(",")[0]


def _slug(setup: Setup) -> str:
    if setup is NATIVE:
        return "native"
    if setup is AS_CONFIGURED:
        return "all"
    if setup.without:
        return "without"
    names: dict[Part, str] = {Part.PLUGIN: "plugin", Part.OPERATORS: "2", Part.ATEN: "1", Part.COMMUNICATION: "3"}
    slug = "layers-" + "".join(names[part] for part in setup.parts if part is not Part.PLUGIN)
    slug = "plugin" if setup.parts == (Part.PLUGIN,) else slug
    return slug if setup.narrowed is None else f"{slug}-{len(setup.items)}"


def _shortened(names: Sequence[str], of: Sequence[str] | None = None) -> str:
    shown = list(names[:12])
    before = "..., " if of is not None and len(of) > len(names) else ""
    return before + ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
