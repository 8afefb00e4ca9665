"""The documents: every setting, translations of the same structure and commands, links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_fl.config.fields import FIELDS, SECTIONS, Field
from sglang_fl.config.reference import _defaults
from sglang_fl.testing.server import CPU_ARGUMENTS, CPU_ENVIRONMENT

ROOT = Path(__file__).parents[2]
# A page and its translation.
PAGES = {
    "README.md": "README_zh.md",
    "docs/adding_a_chip.md": "docs/adding_a_chip_zh.md",
    "docs/aten.md": "docs/aten_zh.md",
    "docs/communication.md": "docs/communication_zh.md",
    "docs/cpu.md": "docs/cpu_zh.md",
    "docs/operators.md": "docs/operators_zh.md",
}
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def read(name: str) -> str:
    """A page of the project."""
    return (ROOT / name).read_text(encoding="utf-8")


def row(field: Field) -> str:
    """A setting's row, as the README must have it."""
    key = f"`{field.yaml_key}`" if field.yaml_key else "-"
    return f"| `{field.variable}` | {key} | {_defaults(field)} | {field.doc} |"


def test_the_readme_opens_with_three_sentences_and_two_commands() -> None:
    """Given the README, when read from the top, then three sentences say what this is, and two commands follow."""
    _, paragraph, commands, *_ = read("README.md").split("\n\n")
    assert len(re.findall(r"\.(?= |$)", paragraph)) == 3, paragraph
    assert commands == "```sh\nmake demo\nmake test\n```"


@pytest.mark.parametrize("section", SECTIONS)
def test_the_readme_has_every_setting(section: str) -> None:
    """Given the table of settings, then each section of the README holds its rows, word for word, and no others."""
    wanted = [row(field) for field in FIELDS if field.section == section]
    part = re.split(r"^##+ ", read("README.md").split(f"### {SECTIONS[section]}\n")[1], maxsplit=1, flags=re.MULTILINE)[
        0
    ]
    found = [line for line in part.splitlines() if line.startswith("| `")]
    assert found == wanted, "the rows must be:\n" + "\n".join(wanted)


def test_the_translation_has_every_setting() -> None:
    """Given the table of settings, then the translation names the same variables and keys in the same order."""
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| \S.*? \| \S.* \|$", read("README_zh.md"), flags=re.MULTILINE)
    assert rows == [(field.variable, f"`{field.yaml_key}`" if field.yaml_key else "-") for field in FIELDS]


@pytest.mark.parametrize("page", PAGES)
def test_a_translation_has_the_same_structure(page: str) -> None:
    """Given a page, then its translation has the same headings by level, code blocks, and rows of tables."""
    original, translation = read(page), read(PAGES[page])
    assert FENCED.findall(original) == FENCED.findall(translation)
    shapes = []
    for text in (original, translation):
        lines = FENCED.sub("", text).splitlines()
        headings = [line.split(" ")[0] for line in lines if line.startswith("#")]
        tables = [len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")]
        shapes.append((headings, tables, sum(line.startswith("- ") for line in lines)))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("page", [*PAGES, *PAGES.values()])
def test_links_lead_to_files(page: str) -> None:
    """Given a page, then each link to a place of the project leads to a file."""
    targets = [target for target in re.findall(r"\]\(([^)#]+)", read(page)) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).is_file()] == []


def test_the_cpu_page_has_what_servers_are_started_with() -> None:
    """Given the variables and options of the demo's and the tests' servers, then the page's command and tables have
    them, and no others but those of its own."""
    page = read("docs/cpu.md")
    command = FENCED.findall(page)[0]
    exported = dict(re.findall(r"(\w+)=(\S+)", "\n".join(re.findall(r"^export (.*)$", command, flags=re.MULTILINE))))
    assert exported.pop("SGLANG_CPU_OMP_THREADS_BIND") == "'0|1'"
    assert exported == CPU_ENVIRONMENT
    options = set(re.findall(r"--[\w-]+(?:=\S+)?", command)) - {"--model-path=$MODEL", "--port=30000", "--tp-size=2"}
    assert options == {*CPU_ARGUMENTS, "--dtype=float32"}
    described = re.findall(r"^\| `(\S+)`[^|]* \|", page.replace("\\|", "|"), flags=re.MULTILINE)
    assert options <= set(described)
    assert {f"{name}={value}" for name, value in CPU_ENVIRONMENT.items()} <= set(described)
