"""The end-to-end benchmark in several calls: which starts are kept, which are made again, and what the record says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.e2e import command, resume, run, servers
from benchmarks.e2e.run import Start, Step
from benchmarks.e2e.tokens import Answer
from sglang_fl.testing.server import ServerError


def answer(*ids: int) -> list[Answer]:
    """One prompt's."""
    return [Answer(ids, [{token: 8.0, 99: 0.1} for token in ids])]


class _Calls:
    """The program on a CPU, with stand-ins for servers: each start takes 65 s, and what is in ``broken`` fails."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.broken, self.now, self.made = folder, set[str](), 0.0, []
        self.commit = "abc"
        patch.setattr(run.time, "monotonic", lambda: self.now)
        patch.setattr(run, "_measure", self.measure)
        patch.setattr(servers.Site, "wait_until_free", lambda _: None)

    def measure(self, steps: Sequence[Step], *_: object) -> list[Start]:
        """A start whose sample says how manieth of all it is; each is faster than the one before."""
        (step,) = steps
        self.now += 65.0
        if step.name in self.broken:
            raise ServerError("it did not come up\nlog")
        self.made.append(step.name)
        samples = {"decode {}, batch 1": [100.0 - len(self.made)]}
        found = Start(step, 20.0, answer(1, 2, 3), samples, weights={0: {"norm.weight": "a"}}, lines=["on"])
        if step.is_control:
            found.switched, found.places = {"all_reduce": answer(1, 2, 4)}, {"all_reduce": "layers.0"}
        return [found]

    def call(self, *arguments: str) -> tuple[int, dict[str, Any], list[str]]:
        """The exit code, the record and which starts this call made."""
        before = len(self.made)
        plan = ["--device=cpu", "--shape=tiny", "--configurations=native,verified", "--starts=3", "--controls"]
        code = command.main([*plan, f"--out={self.folder}", f"--commit={self.commit}", *arguments])
        return code, json.loads((self.folder / "e2e.json").read_text()), self.made[before:]


ROUNDS = ["0-native", "0-verified", "1-native", "1-verified", "2-native", "2-verified", "2-verified-controls"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Calls:
    """Nothing was called yet."""
    return _Calls(monkeypatch, tmp_path)


def test_a_run_goes_on_where_the_last_call_s_time_was_over(calls: _Calls, capsys: pytest.CaptureFixture[str]) -> None:
    """Given time for three starts a call, then whole rounds are kept, others made again, and each call is told."""
    code, first, made = calls.call("--limit-s=200")
    assert (code, made, len(first["calls"])) == (3, ROUNDS[:3], 1)
    code, _, made = calls.call("--limit-s=200", "--resume")
    assert (code, made) == (3, ROUNDS[2:5])
    said = " ".join(capsys.readouterr().out.split())
    assert "1-native will be made again: a round without 1-verified" in said
    _, last, made = calls.call("--resume")
    assert made == ROUNDS[4:]
    assert [each["made"] for each in last["calls"]] == [ROUNDS[:2], ROUNDS[2:4], ROUNDS[4:]]
    assert [each["limit_s"] for each in last["calls"]] == [200, 200, command.DEFAULT_LIMIT_S]
    assert last["calls"][0]["not_run"] == ROUNDS[3:] and last["not_run"] == []
    assert [each["name"] for each in last["starts"]] == ROUNDS
    assert [each["call"] for each in last["starts"]] == [1, 1, 2, 2, 3, 3, 3]
    (row,) = [each for each in last["rows"] if each["name"] == "decode verified, batch 1"]
    assert (row["reference_samples"], row["samples"]) == ([99.0, 96.0, 93.0], [98.0, 95.0, 92.0])
    said = " ".join(capsys.readouterr().out.split())
    assert "made in 3 calls: call 1: 0-native, 0-verified; call 2: 1-native" in said


def test_a_call_with_nothing_left_to_make_gives_the_same_rows(calls: _Calls) -> None:
    """Given a complete record, then a further call makes nothing, and all rows are those of before, controls too."""
    code, first, _ = calls.call()
    again, second, made = calls.call("--resume")
    assert (again, made) == (code, [])
    assert second["rows"] == first["rows"] and second["starts"] == first["starts"]
    assert any(row["name"].startswith("control: a fault in all_reduce") for row in second["rows"])
    assert second["differences"] == first["differences"]


def test_a_round_with_a_failure_is_made_again_as_a_whole(calls: _Calls) -> None:
    """Given a plugin's start that failed in the middle, then that round alone is made again, native too."""
    calls.broken = {"1-verified"}
    code, first, _ = calls.call()
    assert code == 1 and list(first["failed"]) == ["1-verified"]
    calls.broken = set()
    _, last, made = calls.call("--resume")
    assert made == ROUNDS[2:4]
    assert [each["name"] for each in last["starts"]] == ROUNDS and last["failed"] == {}
    assert last["calls"][0]["failed"] == {"1-verified": "it did not come up"}


def test_a_call_that_is_ended_in_between_loses_no_round(calls: _Calls) -> None:
    """Given a call that ends while it makes the first round again, then the record still has the others."""
    calls.broken = {"0-verified"}
    calls.call()
    calls.call("--resume", "--limit-s=70")
    calls.broken = set()
    _, last, made = calls.call("--resume")
    assert made == ROUNDS[:2] and [each["name"] for each in last["starts"]] == ROUNDS


@pytest.mark.parametrize("changed", ["repeats", "commit", "changes", "machine", "file", "missing", "record"])
def test_starts_of_another_run_are_not_kept(
    calls: _Calls, changed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given other arguments, commits or machines, or a start's file that is another or gone, then it is made again."""
    calls.commit = "abc+changes" if changed == "changes" else "abc"
    calls.call()
    path = calls.folder / "0-native.start.json"
    if changed == "commit":
        calls.commit = "def"
    elif changed == "machine":
        monkeypatch.setattr(resume.platform, "node", lambda: "another")
    elif changed == "file":
        path.write_text(path.read_text().replace('"call": 1', '"call": 2'))
    elif changed == "missing":
        path.unlink()
    elif changed == "record":
        (calls.folder / "e2e.json").unlink()
    _, last, made = calls.call("--resume", *(["--repeats=2"] if changed == "repeats" else []))
    said = " ".join(capsys.readouterr().out.split())
    expected = {
        "repeats": "nothing is kept: the record is of another run, with other repeats",
        "commit": "nothing is kept: the record is of commit abc, this is def",
        "changes": "nothing is kept: the checkout has changes that are in no commit",
        "machine": "nothing is kept: the record is of another run, with other machine",
        "file": "is not the file that the record names by its digest",
        "missing": "0-native is not kept: [Errno 2] No such file or directory",
        "record": "nothing is kept: there is no record yet",
    }
    assert expected[changed] in said
    assert made == (ROUNDS[:2] if changed in ("file", "missing") else ROUNDS)
    assert len(last["calls"]) == (2 if changed in ("file", "missing") else 1)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"commit": "abc", "digests": []}', '{"commit": "a", "calls": [1]}']
)
def test_resume_from_what_is_no_record_is_refused(
    calls: _Calls, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a file that is cut off or something else, then 2, and it stays as it is."""
    path = calls.folder / "e2e.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        calls.call("--resume")
    assert "e2e.json is no record to go on from" in capsys.readouterr().err
    assert path.read_text() == content and calls.made == []


def test_one_rank_s_record_says_that_flagcx_carries_nothing(calls: _Calls, capsys: pytest.CaptureFixture[str]) -> None:
    """Given mode all on one rank, then record and output say that there is nothing for FlagCX to carry."""
    _, found, _ = calls.call("--configurations=native,flagcx", "--starts=1")
    (note,) = found["notes"]
    assert note == "one rank has nothing to communicate: flagcx carries nothing in flagcx"
    assert note in capsys.readouterr().out
