"""The documents: translations of the same structure and commands, links that lead somewhere, tables from the code."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import yaml

from sglang_fl.config.fields import FIELDS, SECTIONS
from sglang_fl.config.pages import ENGLISH, Language, allowed_in_words, chinese, filled, table
from sglang_fl.testing.server import CPU_ARGUMENTS, CPU_ENVIRONMENT
from tests.documents import (
    FENCED,
    NAMED,
    NEEDS,
    ROOT,
    RUNNABLE,
    RUNS,
    Runs,
    anchors,
    blocks,
    links,
    output_pattern,
    pages,
    read,
)

PAGES = pages()
BOTH = [*PAGES, *PAGES.values()]
IN_DOCS = [page for page in BOTH if page.startswith("docs/") and not page.startswith("docs/index")]
LANGUAGES = (ENGLISH, chinese())


def setting_rows(page: str) -> list[str]:
    """The rows of a page's tables that begin with a variable of the plugin."""
    variables = {field.variable for field in FIELDS}
    lines = [line for line in read(page).splitlines() if line.startswith("| `")]
    return [line for line in lines if line.split("`")[1] in variables]


def test_the_readme_opens_with_three_sentences_and_two_commands() -> None:
    """Given the README, when read from the top, then three sentences say what this is, and two commands follow."""
    paragraph, commands = [part for part in read("README.md").split("\n\n")[1:4] if part != "needs: network"][:2]
    assert len(re.findall(r"\.(?= |$)", paragraph)) == 3, paragraph
    assert commands == "```sh\nmake demo\nmake test\n```"


@pytest.mark.parametrize(
    ("page", "reference"), [("README.md", "configuration.md"), ("README_zh.md", "configuration_zh.md")]
)
def test_a_readme_leaves_the_settings_to_the_reference(page: str, reference: str) -> None:
    """Given a README, then it has no table of settings that could grow stale, and leads to the page that has them."""
    assert setting_rows(page) == []
    assert (f"docs/{reference}", "") in links(page)


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.page)
def test_the_tables_of_the_configuration_are_those_of_the_code(language: Language) -> None:
    """Given the table of settings, then the page's tables are what is written from it, one for each section."""
    page = f"docs/{language.page}"
    assert re.findall(r"^<!-- settings: (\w+) -->$", read(page), flags=re.MULTILINE) == list(SECTIONS)
    assert filled(read(page), language) == read(page), "write them anew: python -m sglang_fl.config.pages docs"
    assert len(setting_rows(page)) == len(FIELDS)


def test_every_setting_has_a_meaning_in_chinese() -> None:
    """Given the table of settings, then the Chinese texts are those of its fields, and nothing English is left."""
    language = chinese()
    assert language.meanings is not None
    assert list(language.meanings) == [field.name for field in FIELDS]
    tables = "".join(table(section, language) for section in SECTIONS)
    assert re.findall(r"\b(?:not set|a list of|one of|a path|such as| in YAML)\b", tables) == []


def test_a_table_that_is_stale_or_lacks_a_translation_is_noticed() -> None:
    """Given a page with another default, and allowed values that nobody has translated, then the checks say so."""
    page = read("docs/configuration.md")
    assert filled(page.replace("| 120 | yes |", "| 121 | yes |"), ENGLISH) == page != page.replace("| 120 |", "| 121 |")
    with pytest.raises(KeyError, match=r"fields_zh\.yaml"):
        allowed_in_words("a colour", chinese())


@pytest.mark.parametrize("page", PAGES)
def test_a_translation_has_the_same_structure(page: str) -> None:
    """Given a page, then its translation has the same headings by level, blocks with the same needs, and tables."""
    original, translation = blocks(page), blocks(PAGES[page])
    assert [(block.language, block.text, block.needs, block.name) for block in original] == [
        (block.language, block.text, block.needs, block.name) for block in translation
    ]
    shapes = []
    for name in (page, PAGES[page]):
        lines = FENCED.sub("", read(name)).splitlines()
        headings = [line.split(" ")[0] for line in lines if line.startswith("#")]
        tables = [len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")]
        shapes.append((headings, tables, sum(line.startswith("- ") for line in lines)))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("page", BOTH)
def test_links_lead_somewhere(page: str) -> None:
    """Given a page, then each link to a place of the project leads to a file and, where it names one, a heading."""
    folder = (ROOT / page).parent
    found = [((folder / path).resolve() if path else ROOT / page, anchor) for path, anchor in links(page)]
    assert found
    assert [str(path) for path, _ in found if not path.is_file()] == []
    wanted = [(str(path.relative_to(ROOT)), anchor) for path, anchor in found if anchor]
    assert [(path, anchor) for path, anchor in wanted if anchors(path).count(anchor) != 1] == []


@pytest.mark.parametrize("page", BOTH)
def test_a_page_links_within_its_language(page: str) -> None:
    """Given a page, then its links to other pages stay in its language, but for one: to its translation."""
    counterpart = {**PAGES, **{translation: page for page, translation in PAGES.items()}}[page]
    folder = (ROOT / page).parent
    targets = [str((folder / path).resolve().relative_to(ROOT)) for path, _ in links(page) if path]
    others = set(PAGES.values()) if page in PAGES else set(PAGES)
    assert [target for target in targets if target in others] == [counterpart]


@pytest.mark.parametrize("page", IN_DOCS)
def test_a_page_leads_to_its_translation_and_to_all_others(page: str) -> None:
    """Given a page, then the line below its title leads to the other language and to the list of pages."""
    name = page.removeprefix("docs/")
    navigation = (
        f"[English]({name.replace('_zh.md', '.md')}) · [全部文档](index_zh.md)"
        if name.endswith("_zh.md")
        else f"[中文]({name.replace('.md', '_zh.md')}) · [All documents](index.md)"
    )
    assert read(page).split("\n")[1:4] == ["", navigation, ""]


@pytest.mark.parametrize(("index", "number"), [("docs/index.md", 0), ("docs/index_zh.md", 1)])
def test_the_index_has_every_page(index: str, number: int) -> None:
    """Given the list of pages, then it leads to every page of its language."""
    wanted = {
        pair[number].removeprefix("docs/") for pair in PAGES.items() if pair[0] not in ("README.md", "docs/index.md")
    }
    assert wanted <= {path for path, _ in links(index)}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_block_is_run_or_says_what_it_needs(page: str) -> None:
    """Given a page, then each program of it is run in order, is run by the name above it, or is marked; all counted."""
    programs = [block for block in blocks(page) if block.is_runnable]
    assert [block.place for block in programs if not set(block.needs) <= set(NEEDS)] == []
    counted = Counter(block.sort for block in programs)
    wanted = RUNS.get(page, Runs(run=0))
    assert (counted["run"], counted["network"], counted["gpu"]) == (wanted.run, wanted.network, wanted.gpu)


@pytest.mark.parametrize("name", NAMED)
def test_a_named_block_is_taken_by_its_test(name: str) -> None:
    """Given a name that stands above a block, then one page has it once, and the test that runs it knows it."""
    places = [block.place for page in PAGES for block in blocks(page) if block.name == name]
    assert len(places) == 1
    assert f'"{name}"' in read(NAMED[name])


@pytest.mark.parametrize("page", BOTH)
def test_blocks_are_whole(page: str) -> None:
    """Given a page, then its fences pair up at the beginning of a line, and their languages are known."""
    assert re.findall(r"^[ \t]+```", read(page), flags=re.MULTILINE) == []
    assert len(re.findall(r"^```", read(page), flags=re.MULTILINE)) == 2 * len(blocks(page))
    assert {block.language for block in blocks(page)} <= {*RUNNABLE, "", "text", "yaml", "json"}
    for block in blocks(page):
        if block.language == "yaml":
            yaml.safe_load(block.text)


@pytest.mark.parametrize(
    ("shown", "output", "holds"),
    [
        ("a  b\n", "a b\n", True),
        ("a b\n", "ab\n", False),
        ("a\nc\n", "a\nb\nc\n", False),
        ("a\n...\nc\n", "a\nb\nc\n", True),
        ("a ... d\n", "a b c d\n", True),
        ("a ... d\n", "a b c\nd\n", False),
        ("b\n", "ab\n", False),
        ("a.b\n", "axb\n", False),
    ],
)
def test_what_is_shown_is_held_against_the_output(shown: str, output: str, holds: bool) -> None:
    """Given what a page shows and what came, then they agree up to blanks and to what the dots stand for."""
    assert bool(output_pattern(shown).search(output)) is holds


def test_the_cpu_page_has_what_servers_are_started_with() -> None:
    """Given the variables and options of the demo's and the tests' servers, then the page's command and tables have
    them, and no others but those of its own."""
    page = read("docs/cpu.md")
    command = blocks("docs/cpu.md")[0].text
    exported = dict(re.findall(r"(\w+)=(\S+)", "\n".join(re.findall(r"^export (.*)$", command, flags=re.MULTILINE))))
    assert exported.pop("SGLANG_CPU_OMP_THREADS_BIND") == "'0|1'"
    assert exported == CPU_ENVIRONMENT
    options = set(re.findall(r"--[\w-]+(?:=\S+)?", command)) - {"--model-path=$MODEL", "--port=30000", "--tp-size=2"}
    assert options == {*CPU_ARGUMENTS, "--dtype=float32"}
    described = re.findall(r"^\| `(\S+)`[^|]* \|", page.replace("\\|", "|"), flags=re.MULTILINE)
    assert options <= set(described)
    assert {f"{name}={value}" for name, value in CPU_ENVIRONMENT.items()} <= set(described)
