"""The table of settings: variable and YAML mean the same for every field, and sample.yaml documents each."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fl.config import (
    _CONFIG_DIR,
    FIELDS,
    SECTIONS,
    Field,
    OpBackend,
    OpOrder,
    Settings,
    SettingsError,
    SourceKind,
    canonical_vendor,
    load_settings,
)
from sglang_fl.config.reference import has_shown_default, sample_yaml
from sglang_fl.config.value_types import Boolean, Choice
from sglang_fl.config.values import BackendKind

VARIABLES_OF_THE_DOCUMENTS = {
    "SGLANG_FL_OOT_ENABLED", "SGLANG_FL_PREFER", "SGLANG_FL_PER_OP", "SGLANG_FL_OOT_BLACKLIST",
    "SGLANG_FL_OOT_WHITELIST", "SGLANG_FL_STRICT", "SGLANG_FL_DENY_VENDORS", "SGLANG_FL_ALLOW_VENDORS",
    "SGLANG_FL_DISPATCH_LOG", "USE_FLAGGEMS", "SGLANG_FL_FLAGOS_WHITELIST", "SGLANG_FL_FLAGOS_BLACKLIST",
    "SGLANG_FLAGGEMS_RECORD", "SGLANG_FLAGGEMS_LOG_PATH", "SGLANG_FLAGGEMS_LOG_ONCE",
    "SGLANG_FL_DIST_BACKEND", "FLAGCX_PATH", "SGLANG_FL_COMM_MODE", "SGLANG_FL_COMM_ROUTES",
    "SGLANG_FL_COMM_GRAPH_MIXING",
    "SGLANG_FL_COMM_AUDIT", "SGLANG_FL_COMM_TIMEOUT_S", "SGLANG_FL_COMM_CREATE_TIMEOUT_S", "SGLANG_FL_COMM_RECORD",
    "SGLANG_FL_COMM_DUMP_DIR", "SGLANG_FL_FLAGOS_PROFILE", "SGLANG_FL_FLAGOS_VERIFIED", "SGLANG_FL_CONFIG",
    "SGLANG_FL_PLATFORM", "SGLANG_FL_LOG_LEVEL", "ATTENTION_BACKEND",
}  # fmt: skip
YAML_FIELDS = [field for field in FIELDS if field.yaml_key is not None]


def field_id(field: Field) -> str:
    return field.name


def yaml_line(field: Field, value: str) -> str:
    """One field as the text of a YAML file, in block style for what is nested."""
    section, nested, key = str(field.yaml_key).rpartition(".")
    return f"{section}:\n  {key}: {value}\n" if nested else f"{key}: {value}\n"


def accepted_spellings() -> list[tuple[Field, str]]:
    """Every field with each of its words, or with its example where it takes more than a word."""
    pairs: list[tuple[Field, str]] = []
    for field in YAML_FIELDS:
        if isinstance(field.type, Boolean):
            pairs += [(field, word) for word in ["1", "0", "true", "FALSE", "Yes", "no", "ON", "off"]]
        elif isinstance(field.type, Choice):
            pairs += [(field, word) for word in field.type.shown]
        else:
            pairs.append((field, field.example))
    return pairs


def load_file(path: Path, text: str, platform: str | None = None) -> Settings:
    path.write_text(text)
    return load_settings({"SGLANG_FL_CONFIG": str(path)}, platform)


def test_table_holds_every_documented_variable_once() -> None:
    variables = [field.variable for field in FIELDS]
    assert set(variables) >= VARIABLES_OF_THE_DOCUMENTS
    assert len(set(variables)) == len(variables)
    assert len({field.name for field in FIELDS}) == len({field.yaml_key for field in FIELDS}) == len(FIELDS)


@pytest.mark.parametrize("field", FIELDS, ids=field_id)
def test_field_is_complete(field: Field) -> None:
    assert field.section in SECTIONS
    assert field.doc.isascii() and len(field.doc) > 10
    assert (field.yaml_key is None) == (field.variable == "SGLANG_FL_CONFIG")
    assert field.type.from_text(field.example) != field.default, "the example must show something"


def test_opposites_are_mutual() -> None:
    by_name = {field.name: field for field in FIELDS}
    pairs = {(field.name, field.opposite) for field in FIELDS if field.opposite}
    assert {(opposite, name) for name, opposite in pairs} == pairs
    assert pairs, "the black and white lists are opposites"
    assert all(by_name[name].section == by_name[str(opposite)].section for name, opposite in pairs)


@pytest.mark.parametrize(
    ("field", "text"), accepted_spellings(), ids=[f"{f.name}-{t}" for f, t in accepted_spellings()]
)
def test_variable_and_yaml_give_the_same_value(field: Field, text: str, tmp_path: Path) -> None:
    # given the same setting as a variable and as a YAML line
    value = field.type.from_text(text)
    one_word = isinstance(field.type, Boolean | Choice)
    line = yaml_line(field, text if one_word else field.type.to_yaml(value).replace("\n", "\n  "))
    # when both are loaded
    from_variable = load_settings({field.variable: text})
    from_yaml = load_file(tmp_path / "settings.yaml", line)
    # then they are equal, in value, in report and in the digest's text, and differ in source alone
    assert from_variable.value(field.name) == from_yaml.value(field.name) == value
    assert from_variable.text(field.name) == from_yaml.text(field.name)
    assert from_variable.comparable() == from_yaml.comparable()
    assert from_variable.source(field.name).kind is SourceKind.ENVIRONMENT
    assert from_variable.source(field.name).where == field.variable
    key_line = 2 if "." in str(field.yaml_key) else 1
    assert from_yaml.source(field.name).kind is SourceKind.YAML
    assert from_yaml.source(field.name).where == f"{tmp_path / 'settings.yaml'}:{key_line}"


@pytest.mark.parametrize("field", FIELDS, ids=field_id)
def test_text_of_a_value_reads_back_as_the_value(field: Field) -> None:
    value = field.type.from_text(field.example)
    assert field.type.to_text(field.type.from_text(field.type.to_text(value))) == field.type.to_text(value)


def test_values_of_the_documents_examples(tmp_path: Path) -> None:
    # given the documents' YAML, with lists in block style
    settings = load_file(
        tmp_path / "my_config.yaml",
        "prefer: flagos\nop_backends:\n  rms_norm: [vendor, flagos, reference]\n"
        "  silu_and_mul:\n    - flagos\n    - vendor:cuda\n"
        "oot_blacklist:\n  - RotaryEmbedding\nflagos_blacklist:\n  - mul\n  - sub\n",
    )
    # then
    flagos, vendor, reference = (OpBackend(kind) for kind in BackendKind)
    assert settings.ops.backends == (
        OpOrder("rms_norm", (vendor, flagos, reference)),
        OpOrder("silu_and_mul", (flagos, OpBackend(BackendKind.VENDOR, "nvidia"))),
    )
    assert settings.ops.backends_for("rms_norm") == (vendor, flagos, reference)
    assert settings.ops.backends_for("rotary_embedding") == ()
    assert settings.ops.blacklist == ("RotaryEmbedding",)
    assert settings.aten.blacklist == ("mul", "sub")
    # and the documents' variable
    per_op = load_settings({"SGLANG_FL_PER_OP": "rms_norm=vendor|flagos;silu_and_mul=reference"})
    assert per_op.ops.backends_for("rms_norm") == (vendor, flagos)
    assert per_op.ops.backends_for("silu_and_mul") == (reference,)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [("cuda", "nvidia"), ("nvidia", "nvidia"), ("NVIDIA", "nvidia"), ("npu", "ascend"), ("ascend", "ascend"),
     ("musa", "mthreads"), ("my_chip", "my_chip")],
)  # fmt: skip
def test_vendor_aliases(name: str, canonical: str) -> None:
    assert canonical_vendor(name) == canonical
    settings = load_settings({"SGLANG_FL_DENY_VENDORS": name, "SGLANG_FL_PER_OP": f"rms_norm=vendor:{name}"})
    assert settings.ops.deny_vendors == (canonical,)
    assert settings.ops.backends_for("rms_norm") == (OpBackend(BackendKind.VENDOR, canonical),)


def test_defaults_without_any_source() -> None:
    settings = load_settings({})
    for field in FIELDS:
        assert settings.value(field.name) == field.default
        assert str(settings.source(field.name)) == "default"
    assert settings.warnings == ()


def test_sample_is_what_the_table_says() -> None:
    written = (_CONFIG_DIR / "sample.yaml").read_text()
    assert written == sample_yaml(), "run: python -m sglang_fl.config.reference > sglang_fl/config/sample.yaml"
    assert all(field.variable in written and field.doc.split(";")[0][:40] in written for field in YAML_FIELDS)


@pytest.mark.parametrize("platform", [None, "cuda", "ascend", "cpu", "musa"])
def test_sample_as_it_is_changes_nothing(platform: str | None) -> None:
    with_sample = load_settings({"SGLANG_FL_CONFIG": str(_CONFIG_DIR / "sample.yaml")}, platform)
    assert with_sample.comparable() == load_settings({}, platform).comparable()
    assert with_sample.warnings == ()


def uncomment(sample: str, fields: list[Field]) -> str:
    """The sample with these fields' lines turned into settings; "# " and "#  #" begin explanations."""
    paths = {str(field.yaml_key) for field in fields}
    lines: list[str] = []
    top = nested = ""
    for line in sample.splitlines():
        key = line.removeprefix("#").strip().partition(":")[0]
        if re.match(r"#\w", line):
            top = nested = key
        if re.match(r"#  \w", line):
            nested = key
        is_setting = re.match(r"#(\w|  [^#])", line) is not None
        opens_section = key == top and any(path.startswith(f"{top}.") for path in paths)
        chosen = top in paths or f"{top}.{nested}" in paths or opens_section
        lines.append(line[1:] if is_setting and chosen else line)
    return "\n".join(lines) + "\n"


def test_uncommented_defaults_of_the_sample_are_the_defaults(tmp_path: Path) -> None:
    # given a copy of the sample in which every default is a setting
    shown = [field for field in YAML_FIELDS if has_shown_default(field)]
    settings = load_file(tmp_path / "copy.yaml", uncomment(sample_yaml(), shown))
    # then each comes from the file and equals the default
    for field in shown:
        assert settings.source(field.name).kind is SourceKind.YAML, field.name
        assert settings.value(field.name) == field.default, field.name


@pytest.mark.parametrize("field", [f for f in YAML_FIELDS if not has_shown_default(f)], ids=field_id)
def test_uncommented_example_of_the_sample_is_the_example(field: Field, tmp_path: Path) -> None:
    settings = load_file(tmp_path / "copy.yaml", uncomment(sample_yaml(), [field]))
    assert settings.source(field.name).kind is SourceKind.YAML
    assert settings.value(field.name) == field.type.from_text(field.example)


@pytest.mark.parametrize(
    ("platform", "backend", "file"),
    [("cuda", "nccl", "nvidia.yaml"), ("nvidia", "nccl", "nvidia.yaml"), ("ascend", "hccl", "ascend.yaml"),
     ("npu", "hccl", "ascend.yaml"), ("cpu", "torch", "cpu.yaml"), ("musa", "auto", "default"),
     (None, "auto", "default")],
)  # fmt: skip
def test_platform_defaults(platform: str | None, backend: str, file: str) -> None:
    settings = load_settings({}, platform)
    assert settings.comm.backend == backend
    assert settings.source("comm.backend").where == file


def test_settings_are_frozen() -> None:
    settings = load_settings({})
    for part, attribute in ((settings, "comm"), (settings.comm, "backend"), (settings.ops, "strict")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, attribute, None)
    assert hash(settings) == hash(load_settings({}))


def test_digest_names_what_all_ranks_share() -> None:
    # given what may differ from node to node
    node_0 = load_settings({"FLAGCX_PATH": "/opt/a", "SGLANG_FL_DISPATCH_LOG": "/tmp/a"}, "cuda")
    node_1 = load_settings(
        {"FLAGCX_PATH": "/opt/b", "SGLANG_FLAGGEMS_RECORD": "1", "SGLANG_FL_LOG_LEVEL": "DEBUG"}, "cuda"
    )
    assert node_0.digest() == node_1.digest()
    # when one has no FLAGCX_PATH, it has another backend: that field is named
    node_2 = load_settings({}, "cuda")
    assert node_2.digest() != node_0.digest()
    differing = {name for name, text in node_2.comparable().items() if text != node_0.comparable()[name]}
    assert differing == {"comm.backend"}
    # and the order of names in a list is no difference
    texts = ("mul,sub", "sub,mul,sub")
    first, second = (load_settings({"SGLANG_FL_FLAGOS_BLACKLIST": text}) for text in texts)
    assert first.digest() == second.digest()


@pytest.mark.parametrize("field", FIELDS, ids=field_id)
def test_every_compared_field_moves_the_digest(field: Field, tmp_path: Path) -> None:
    example = field.example
    if field.variable == "SGLANG_FL_CONFIG":
        example = str(tmp_path / "settings.yaml")
        Path(example).write_text("prefer: flagos\n")
    fixed_backend = {"SGLANG_FL_DIST_BACKEND": "nccl"}
    base, changed = load_settings(fixed_backend), load_settings({**fixed_backend, field.variable: example})
    assert (changed.digest() != base.digest()) == field.compared


def test_digest_is_the_same_in_every_process() -> None:
    # given other hash seeds, when another interpreter computes it, then it is the same
    code = (
        "from sglang_fl.config import load_settings;print(load_settings({'SGLANG_FL_OOT_BLACKLIST': 'B,A'}).digest())"
    )
    digests = {
        subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    }
    assert digests == {load_settings({"SGLANG_FL_OOT_BLACKLIST": "A,B"}).digest() + "\n"}


def test_rows_report_every_field_with_value_and_source() -> None:
    rows = {row.field: row for row in load_settings({"SGLANG_FL_PREFER": "vendor"}, "cuda").rows()}
    assert list(rows) == [field.name for field in FIELDS]
    shown = {name: (rows[name].value, str(rows[name].source)) for name in rows}
    assert shown["ops.prefer"] == ("vendor", "environment SGLANG_FL_PREFER")
    assert shown["comm.backend"] == ("nccl", "platform nvidia.yaml")
    assert shown["comm.flagcx_path"] == ("not set", "default")


def test_unknown_names_of_a_list_are_problems_with_a_suggestion() -> None:
    # given a list with one wrong name and what the layer really knows
    settings = load_settings({"SGLANG_FL_FLAGOS_BLACKLIST": "masked_filll,mul"})
    problems = settings.unknown_names("aten.blacklist", ["masked_fill", "mul", "sub"])
    # then the layer can raise or print it
    assert len(problems) == 1
    text = str(SettingsError(problems))
    for part in (
        "SGLANG_FL_FLAGOS_BLACKLIST",
        "aten.blacklist",
        "'masked_filll'",
        "Did you mean 'masked_fill'?",
    ):
        assert part in text


def test_unknown_names_of_vendors_and_operators() -> None:
    settings = load_settings({"SGLANG_FL_DENY_VENDORS": "cuda,npu,foo", "SGLANG_FL_PER_OP": "rms_nrm=flagos"})
    assert [p.found for p in settings.unknown_names("ops.deny_vendors", ["cuda", "ascend"])] == ["'foo'"]
    (problem,) = settings.unknown_names("ops.backends", ["rms_norm", "silu_and_mul"])
    assert problem.suggestion == "'rms_norm'"
    assert settings.unknown_names("ops.allow_vendors", []) == ()


def test_import_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sglang_fl.config as c; c.load_settings({}, 'cuda');"
        "print(sorted({'torch', 'sglang', 'triton', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
