"""The end-to-end benchmark's command line: what becomes of it, and what is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.e2e import command, options
from benchmarks.e2e.configurations import NATIVE


def test_options_become_the_plan() -> None:
    """Given a command line, then server arguments are what follows --, and controls run with the plugin."""
    found = command.parse(["--controls", "--once", "full", "--device", "cpu", "--", "--mem-fraction-static=0.8"])
    assert found.server_arguments == ["--mem-fraction-static=0.8"]
    assert found.configurations == (NATIVE, "verified")
    assert (found.once, found.controls_on, found.is_on_gpu) == (("full",), "verified", False)


def test_sizes_are_options_and_in_words() -> None:
    """Given stages or DP attention, then they are read, and are in the table's title."""
    stages = command.parse(["--tp", "4", "--pp", "2"])
    assert command.sizes_in_words(stages) == "tp=4, pp=2"
    attention = command.parse(["--shape", "qwen3-14b", "--tp", "8", "--dp-attention"])
    assert command.sizes_in_words(attention) == "tp=8, DP attention"


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ([], ("decode", "sampled decode", "prefill", "gpu decode")),
        (["--rows", "gpu,decode"], ("decode", "gpu decode")),
        (["--rows", "s"], ("sampled decode",)),
    ],
)
def test_rows_are_chosen_by_their_first_letters(arguments: list[str], rows: tuple[str, ...]) -> None:
    """Given first letters, then the rows that begin with them; another choice is another run for --resume."""
    found = command.parse(arguments)
    assert found.timed_rows == rows
    assert command._arguments_that_matter(found)["timed_rows"] == rows


@pytest.mark.parametrize(
    "arguments",
    [
        ["--configurations", "verified"],
        ["--configurations", "native,quick"],
        ["--configurations", "native,native"],
        ["--configurations", "native,verified", "--once", "verified"],
        ["--once", "full,full"],
        ["--controls-on", "verified"],
        ["--starts", "0"],
        ["--tp", "²"],
        ["--rows", "decode,warmth"],
        ["--rows", "decode,"],
        ["--limit-s", "nan"],
        ["--limit-s", "inf"],
        ["--limit-s", "0"],
        ["--limit-s", "-5"],
        ["--limit-s", "soon"],
        ["--shape", "qwen2.5-14b", "--tp", "2", "--dp-attention"],
        ["--shape", "qwen3-14b", "--dp-attention"],
        ["--shape", "qwen3-14b", "--tp", "2", "--pp", "2", "--dp-attention"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given what cannot be, has no effect or is there twice, then 2 at once, and nothing is made."""
    with pytest.raises(SystemExit, match="2"):
        command.parse([f"--out={tmp_path / 'out'}", *arguments])
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out={}/file"], "File exists"),
        (["--out={}/file/out"], "Not a directory"),
        (["--out={}/out", "--json={}/file/x.json"], "File exists"),
        (["--out={}/out", "--json={}"], "Is a directory"),
    ],
)
def test_places_that_cannot_be_written_are_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given logs or a record that would lie in a file, or a record that is a folder, then 2 and which option it is."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        command.parse([each.format(tmp_path) for each in arguments])
    said = capsys.readouterr().err
    assert f"error: {arguments[-1].split('=')[0]} " in said and words in said
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "arguments", [["--configurations=native,flagcx"], ["--once=fastest"], ["--controls", "--controls-on=flagcx"]]
)
def test_flagcx_that_leads_nowhere_is_refused(
    arguments: list[str],
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Given FLAGCX_PATH with nothing there, then what needs it is refused at two ranks, all else is not."""
    monkeypatch.setenv("FLAGCX_PATH", "/nowhere")
    place = [f"--device={device}", f"--out={tmp_path / 'out'}"]
    for sizes in ("--tp=2", "--pp=2"):
        with pytest.raises(SystemExit, match="2"):
            command.parse([*place, sizes, *arguments])
        assert "FLAGCX_PATH is /nowhere, which does not exist; " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert command.parse([*place, "--tp=2"]).notes == []
    (note,) = command.parse([*place, *arguments]).notes
    assert note.startswith("one rank has nothing to communicate: flagcx carries nothing in f")


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a process that is ended in the middle of writing, then the record before stays; a later one replaces it."""
    path = tmp_path / "record.json"
    options.write_whole({"rows": [1]}, path)

    def ended(content: object, place: Path) -> None:
        place.write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(options.record, "write", ended)
        with pytest.raises(KeyboardInterrupt):
            options.write_whole({"rows": [2]}, path)
    assert options.read_record(path) == {"rows": [1]}
    places = []
    monkeypatch.setattr(options.record, "write", lambda _, place: places.append(place) or place.write_text("{}"))
    options.write_whole({"rows": [3]}, path)
    assert options.read_record(path) == {} and path not in places


def test_flagcx_that_is_not_set_is_refused_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given no FLAGCX_PATH, then GPUs have none, and a CPU has hostcx, which stands here for a folder without it."""
    monkeypatch.delenv("FLAGCX_PATH", raising=False)
    monkeypatch.setattr(options, "HOSTCX", tmp_path / "hostcx")
    wanted = {
        "cuda": "FLAGCX_PATH is not set; set it to",
        "cpu": f"{tmp_path / 'hostcx'}, which does not exist; run make",
    }
    for device, words in wanted.items():
        with pytest.raises(SystemExit, match="2"):
            command.parse([f"--device={device}", "--tp=2", "--configurations=native,flagcx"])
        assert words in capsys.readouterr().err
