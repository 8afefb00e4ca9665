"""The documents as data: their code blocks, what each needs, and the output that stands below it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
# A visible line above a block that cannot be run everywhere: "needs: gpu, network".
NEEDS = ("gpu", "network")
_NEEDS_LINE = re.compile(r"(?:needs|需要): (.*)")
_NAME_LINE = re.compile(r"<!-- ([\w-]+) -->")
RUNNABLE = ("sh", "python")


@dataclass(frozen=True)
class Runs:
    """What is run of a page, in order in a fresh folder. A block more or less is written down here.

    run: blocks that run here; network, gpu: those that need it (gpu: mostly both); starts_servers: whether they want
    the machine for themselves; shows_output: whether a block of ``text`` is what the program above it prints.
    """

    run: int
    network: int = 0
    gpu: int = 0
    starts_servers: bool = False
    shows_output: bool = True


RUNS = {
    "README.md": Runs(run=0, network=5, gpu=2),
    "docs/aten.md": Runs(run=0, gpu=2),
    "docs/adding_a_chip.md": Runs(run=0, gpu=1),
    "docs/communication.md": Runs(run=2, network=2, gpu=2, shows_output=False),
    "docs/configuration.md": Runs(run=5, network=1),
    "docs/cpu.md": Runs(run=2, starts_servers=True),
    "docs/operators.md": Runs(run=1, gpu=4),
    "docs/quick_start.md": Runs(run=10, network=3, gpu=3, starts_servers=True),
    "docs/tools.md": Runs(run=7, network=2, gpu=2, shows_output=False),
    "docs/troubleshooting.md": Runs(run=0, gpu=2),
}
# Blocks with a name above them, and the test that takes and runs them by it.
NAMED = {
    "operators-in-tree": "tests/unit/test_dispatch_template.py",
    "operators-distribution": "tests/unit/test_dispatch_template.py",
    "operators-compare": "tests/unit/test_dispatch_template.py",
    "in-tree": "tests/distributed/test_template.py",
    "distribution": "tests/distributed/test_template.py",
}
_PAIRS = {"README.md": "README_zh.md"}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    line: the 1-based line of its opening fence; language: what stands behind the fence; text: what is inside;
    needs: what the line above, or a word behind the language, says that it needs; name: what a comment above calls
    it, for a test of its own.
    """

    page: str
    line: int
    language: str
    text: str
    needs: tuple[str, ...] = ()
    name: str | None = None

    @property
    def is_runnable(self) -> bool:
        """Whether it is a program, not data or output."""
        return self.language in RUNNABLE

    @property
    def sort(self) -> str:
        """run, gpu or network, as :class:`Runs` counts it, or named."""
        if self.name in NAMED:
            return "named"
        return "gpu" if "gpu" in self.needs else (*self.needs, "run")[0]

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    """A page of the project, by its path from the root."""
    return (ROOT / page).read_text(encoding="utf-8")


def pages() -> dict[str, str]:
    """Every page and its translation, by path from the root; KeyError where a page has none."""
    found = dict(_PAIRS)
    names = {path.name for path in (ROOT / "docs").glob("*.md")}
    for name in sorted(names):
        if name.endswith("_zh.md"):
            continue
        translation = f"{name.removesuffix('.md')}_zh.md"
        if translation not in names:
            raise KeyError(f"docs/{name} has no translation docs/{translation}")
        found[f"docs/{name}"] = f"docs/{translation}"
    alone = {f"docs/{name}" for name in names} - set(found) - set(found.values())
    if alone:
        raise KeyError(f"translations without a page: {', '.join(sorted(alone))}")
    return found


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return list(_blocks(page, read(page)))


def _blocks(page: str, text: str) -> Iterator[Block]:
    for match in FENCED.finditer(text):
        fence, _, inside = match[0].partition("\n")
        language, *words = fence.removeprefix("```").split() or [""]
        above = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        needs, name = _NEEDS_LINE.fullmatch(above), _NAME_LINE.fullmatch(above)
        yield Block(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            language=language,
            text=inside.removesuffix("```"),
            needs=tuple(needs[1].split(", ") if needs else words),
            name=name[1] if name else None,
        )


def output_pattern(shown: str) -> re.Pattern[str]:
    """What an output must hold so that ``shown`` is true of it.

    Lines follow each other; ``...`` stands for the rest of a line or part of it, and alone on a line for any
    number of lines. The number of blanks between two words does not count.
    """
    parts = []
    for line in shown.rstrip("\n").split("\n"):
        if line.strip() == "...":
            parts.append(r"(?:[^\n]*\n)*?")
            continue
        pieces = [r"[ \t]+".join(re.escape(word) for word in piece.split()) for piece in line.split("...")]
        words = r"[^\n]*".join(pieces)
        parts.append(rf"[ \t]*{words}[ \t]*\n")
    return re.compile("^" + "".join(parts), re.MULTILINE)


def github_anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading: lower case, punctuation away, a hyphen for each blank."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: str) -> list[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", read(page)), flags=re.MULTILINE)
    return [github_anchor(heading) for heading in headings]


def links(page: str) -> list[tuple[str, str]]:
    """The links of a page to places of the project: path from the root ("" for the page itself), and anchor or ""."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", read(page)))
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]
    return [(path, anchor) for path, _, anchor in (target.partition("#") for target in targets)]
