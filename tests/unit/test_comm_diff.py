"""The comparison of ranks' dumps: it names the first call in which they differ, the rank, and what it did instead."""

from __future__ import annotations

import json
import re
import reprlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sglang_fl.cli.frame import commands
from sglang_fl.comm import dumps
from sglang_fl.comm.difference import Comparison, Difference, Kind, compare
from sglang_fl.comm.dump_fields import CALL, DUMP, RECORD, THREAD, damage
from sglang_fl.comm.dump_files import Key, UnreadableDumpError, choose_dumps, read_dump, told_apart
from sglang_fl.comm.dumps import name_recorder, write_dump
from sglang_fl.comm.monitor.verdict import Stuck, Verdict
from sglang_fl.comm.recorder import RecordedCall
from tests.unit.handmade_recorder import HandmadeRecorder

# One call as it is written below: operation, elements, dtype, root, and the line of the caller.
Call = tuple[str, int, str, "int | None", int]
EMBED: Call = ("all_reduce", 64, "float32", None, 10)
ATTENTION: Call = ("all_reduce", 64, "float32", None, 20)
GATHER: Call = ("all_gather", 128, "float32", None, 30)
TELL: Call = ("broadcast", 4, "int64", 0, 40)
FORWARD = [EMBED, ATTENTION, GATHER, TELL]
LONG_AGO_S = 1e9


def recorded(
    sequence: Sequence[Call], first: int = 1, done: bool = False, start_s: float = LONG_AGO_S
) -> list[RecordedCall]:
    """The sequence as recorded calls, of which the last is under way unless ``done``."""
    return [
        RecordedCall(
            first + index, operation, dtype, count, peer, 0, False, f"/srv/model.py:{line} forward", start_s + index,
            start_s + index + 0.5 if done or index + 1 < len(sequence) else None,
        )
        for index, (operation, count, dtype, peer, line) in enumerate(sequence)
    ]  # fmt: skip


def dump(folder: Path, rank: int, *recorders: HandmadeRecorder, reason: str = "time-out") -> Path:
    """What this rank left."""
    return write_dump(reason, recorders, folder, rank=rank)


def made(number: int | str, calls: Sequence[RecordedCall], name: str = "anonymous torch") -> HandmadeRecorder:
    """One of ranks 0 and 1 that the monitor has named by the number of its group's creation."""
    recorder = HandmadeRecorder(name, (0, 1), calls)
    name_recorder(recorder, f"{name} [0, 1] {number}")
    return recorder


def failed(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The same calls, of which the last one failed."""
    *before, last = calls
    return [*before, replace(last, time_out_s=last.time_in_s + 5, error="CommError: not done within 5 s")]


def compared(folder: Path, *sequences: Sequence[Call], done: bool = False) -> Comparison:
    """The comparison of one group's ranks, rank r having called ``sequences[r]``."""
    ranks = range(len(sequences))
    for rank, sequence in enumerate(sequences):
        dump(folder, rank, HandmadeRecorder("tp:0 flagcx", ranks, recorded(sequence, done=done)))
    return compare(choose_dumps([folder]).dumps)


def single(comparison: Comparison) -> Difference:
    """The one difference."""
    (difference,) = comparison.differences
    return difference


@pytest.fixture(autouse=True)
def _private(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_ranks_have_no_difference(tmp_path: Path, world_size: int) -> None:
    """Given the same calls everywhere, then none differs and there is nothing to say."""
    assert compared(tmp_path, *[FORWARD * 3] * world_size) == Comparison((), ())


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("left_out", range(4), ids=["embed", "attention", "gather", "tell"])
def test_a_skipped_call_is_named(tmp_path: Path, world_size: int, left_out: int) -> None:
    """Given rank 1 that leaves out one call of the second forward, two of which are alike but for the place, and
    then waits in its last, then that call is named, and that rank 1 skipped it."""
    others = [*FORWARD, *FORWARD, *FORWARD]
    skipping = [*FORWARD, *(call for index, call in enumerate(FORWARD) if index != left_out), *FORWARD]
    sequences = [skipping if rank == 1 else others for rank in range(world_size)]
    difference = single(compared(tmp_path, *sequences))
    assert (difference.kind, difference.number, difference.who) == (Kind.SKIPPED, 5 + left_out, (1,))
    operation, count, dtype, _, line = FORWARD[left_out]
    assert difference.words.startswith(f"rank 1 skipped call {5 + left_out}: {operation} {dtype}[{count}]")
    assert f"at /srv/model.py:{line} forward" in difference.words


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_skipped_call_is_named_although_all_are_stuck_in_the_next(tmp_path: Path, world_size: int) -> None:
    """Given a host where neither call returned: rank 1 waits in what followed before, then it skipped or swapped."""
    waiting = [*FORWARD, EMBED, ATTENTION, GATHER]
    skipping = [*FORWARD, EMBED, ATTENTION, TELL]
    sequences = [skipping if rank == 1 else waiting for rank in range(world_size)]
    difference = single(compared(tmp_path, *sequences))
    assert (difference.kind, difference.number, difference.who) == (Kind.SKIPPED, 7, (1,))
    assert difference.words == (
        "rank 1 skipped all_gather float32[128], or swapped it with the call that follows it: it is already in "
        "broadcast int64[4] rank 0 at /srv/model.py:40 forward, which came after it as call 4"
    )


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("sent", "kind", "words"),
    [
        (("all_gather", 96, "float32", None, 30), Kind.SHAPE, "sent another shape: all_gather float32[96], the others"),
        (("all_gather", 128, "bfloat16", None, 30), Kind.DTYPE, "sent another dtype: all_gather bfloat16[128], the"),
        (("all_gather", 96, "int8", None, 30), Kind.DTYPE, "sent another dtype and shape: all_gather int8[96], the"),
        (("gather", 128, "float32", 1, 30), Kind.OPERATION, "made another operation"),
    ],
    ids=["shape", "dtype", "dtype and shape", "operation"],
)
def test_another_shape_dtype_or_operation_is_named(
    tmp_path: Path, world_size: int, sent: Call, kind: Kind, words: str
) -> None:
    """Given rank 1 that sends something else in call 7, then that call, the rank where there is a majority, and
    both sides are named."""
    sequences = [[*FORWARD, EMBED, ATTENTION, sent if rank == 1 else GATHER] for rank in range(world_size)]
    difference = single(compared(tmp_path, *sequences))
    assert (difference.kind, difference.number) == (kind, 7)
    if world_size == 2:
        assert difference.who == (0, 1)
        assert "all_gather float32[128] at /srv/model.py:30 forward on rank 0" in difference.words
        assert f"{sent[0]} {sent[2]}[{sent[1]}]" in difference.words.partition("on rank 0")[2]
    else:
        assert difference.who == (1,)
        assert difference.words.startswith(f"rank 1 {words}")


def test_another_root_is_named(tmp_path: Path) -> None:
    """Given a broadcast from rank 1 on one of three ranks, then the root is what differs."""
    wrong: Call = ("broadcast", 4, "int64", 1, 40)
    difference = single(compared(tmp_path, [*FORWARD, TELL], [*FORWARD, TELL], [*FORWARD, wrong]))
    assert (difference.kind, difference.number, difference.who) == (Kind.ROOT, 5, (2,))


def test_a_different_shape_that_went_through_is_no_skip(tmp_path: Path) -> None:
    """Given calls that all returned, one of another shape among them, then the shape is named although the shape that
    was expected comes later as well."""
    wrong: Call = ("all_reduce", 32, "float32", None, 20)
    sequences = [[EMBED, wrong if rank == 1 else ATTENTION, GATHER, ATTENTION] for rank in range(2)]
    difference = single(compared(tmp_path, *sequences))
    assert (difference.kind, difference.number) == (Kind.SHAPE, 2)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("distance", [1, 2])
def test_two_swapped_calls_are_named_as_swapped(tmp_path: Path, world_size: int, distance: int) -> None:
    """Given the last rank that makes two calls of the second forward in the other order, then both are named."""
    swapped = list(FORWARD)
    swapped[1], swapped[1 + distance] = swapped[1 + distance], swapped[1]
    odd = world_size - 1
    sequences = [[*FORWARD, *(swapped if rank == odd else FORWARD), *FORWARD] for rank in range(world_size)]
    difference = single(compared(tmp_path, *sequences))
    assert (difference.kind, difference.number, difference.who) == (Kind.SWAPPED, 6, (odd,))
    assert difference.words.startswith(f"rank {odd} swapped calls 6 and {6 + distance}: ")


@pytest.mark.parametrize("world_size", [2, 4])
def test_who_is_missing_is_named_with_where_it_was(tmp_path: Path, world_size: int) -> None:
    """Given the last rank inside a call of another group, then it is missing from this one's, and where it is too."""
    odd, ranks = world_size - 1, range(world_size)
    for rank in ranks:
        calls = recorded(FORWARD[:2] if rank == odd else FORWARD[:3])
        if rank == odd:
            calls = recorded(FORWARD[:2], done=True)
        groups = [HandmadeRecorder("tp:0 flagcx", ranks, calls)]
        if rank == odd:
            groups.append(HandmadeRecorder("pp:0 flagcx", (odd, 9), recorded([TELL])))
        dump(tmp_path, rank, *groups)
    first, second = compare(choose_dumps([tmp_path]).dumps).differences
    (tp,) = [each for each in (first, second) if each.group == "tp:0 flagcx"]
    (pp,) = [each for each in (first, second) if each.group == "pp:0 flagcx"]
    assert (tp.kind, tp.number, tp.who) == (Kind.MISSING, 3, (odd,))
    assert f"rank {odd} was in call 1 of pp:0 flagcx, broadcast int64[4] rank 0" in tp.words
    assert pp.kind is Kind.NO_RECORD and pp.words == "rank 9 left no dump: gone, or stopped"
    assert first is pp, "the earlier call comes first"


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"pp": failed(recorded([TELL], start_s=LONG_AGO_S + 5))}, "in call 1 of pp, broadcast int64[4] rank 0 at"),
        (
            {
                "dp": failed(recorded([EMBED], start_s=LONG_AGO_S + 5)),
                "pp": failed(recorded([TELL], start_s=LONG_AGO_S + 6)),
            },
            "in call 1 of pp",
        ),
        ({"dp": failed(recorded([EMBED], start_s=LONG_AGO_S + 5)), "pp": recorded([TELL])}, "in call 1 of pp"),
        ({"pp": failed(recorded([TELL], start_s=LONG_AGO_S - 5))}, ""),
    ],
    ids=["failed", "the latest that failed", "under way", "failed before its last call here"],
)
def test_where_a_rank_was_is_named_although_its_call_has_failed(
    tmp_path: Path, own: dict[str, list[RecordedCall]], words: str
) -> None:
    """Given a rank that is missing from a call while one of another group failed in it, then that one is named, but for
    one that failed before it went on in this group; what is still under way comes first."""
    dump(tmp_path, 0, HandmadeRecorder("tp", (0, 1), recorded(FORWARD[:3])))
    others = [HandmadeRecorder(name, (1, 9), calls) for name, calls in own.items()]
    dump(tmp_path, 1, HandmadeRecorder("tp", (0, 1), recorded(FORWARD[:2], done=True)), *others)
    (tp,) = [each for each in compare(choose_dumps([tmp_path]).dumps).differences if each.group == "tp"]
    assert (tp.kind, tp.number, tp.who) == (Kind.MISSING, 3, (1,))
    found = tp.words.removeprefix("rank 1 did not enter it; rank 1")
    assert found.startswith(f" was {words}" if words else "'s last was call 2, all_reduce float32[64]")
    assert found.endswith(", which failed") == (bool(words) and own["pp"][-1].error != "")


def test_a_rank_that_is_still_in_the_call_before_is_in_no_other_group(tmp_path: Path) -> None:
    """Given a rank that has not come back from the call before, then that one is named as its last of this group."""
    words = single(compared(tmp_path, FORWARD[:3], FORWARD[:2])).words
    assert words.startswith("rank 1 did not enter it; rank 1's last was call 2, all_reduce float32[64] at ")


@pytest.mark.parametrize("has_failed", [False, True], ids=["under way", "failed"])
def test_a_rank_without_a_dump_is_named(tmp_path: Path, has_failed: bool) -> None:
    """Given three ranks inside a call, or whose call has failed, and no dump of rank 2, then it is named."""
    calls = failed(recorded(FORWARD)) if has_failed else recorded(FORWARD)
    for rank in (0, 1, 3):
        dump(tmp_path, rank, HandmadeRecorder("tp:0 flagcx", range(4), calls))
    comparison = compare(choose_dumps([tmp_path]).dumps)
    difference = single(comparison)
    assert (difference.kind, difference.number, difference.who) == (Kind.NO_RECORD, 4, (2,))
    assert comparison.notes == ("rank 2 left no dump: gone, or its dump is not among these",)


def test_a_call_that_began_between_two_dumps_is_no_difference(tmp_path: Path) -> None:
    """Given a busy server whose ranks write their dumps a moment apart, then the last call is only mentioned."""
    now_s = time.time()
    for rank, count in enumerate((3, 4)):
        calls = recorded(FORWARD[:count], start_s=now_s - count)
        dump(tmp_path, rank, HandmadeRecorder("tp:0 flagcx", (0, 1), calls))
    comparison = compare(choose_dumps([tmp_path]).dumps)
    # Call 4 began a second before its dump; the other rank's came at the same moment.
    assert [each.kind for each in comparison.differences] in ([], [Kind.MISSING])
    for path in tmp_path.iterdir():
        document = json.loads(path.read_text())
        document["time_s"] = now_s - 0.5
        path.write_text(json.dumps(document))
    comparison = compare(choose_dumps([tmp_path]).dumps)
    assert comparison.differences == ()
    assert comparison.notes[0].startswith("tp:0 flagcx: call 4 is not compared, rank 0 may have been about to enter it")


@pytest.mark.parametrize("waited_s", [60.0, 0.1])
def test_a_dump_from_before_the_call_is_none_of_it(tmp_path: Path, waited_s: float) -> None:
    """Given a rank that left a dump on request, and another that is stuck in a call it entered later, then the first
    left none that counts; where the other had only just entered the call, there is nothing to say."""
    now_s = time.time()
    dump(tmp_path, 1, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD, done=True, start_s=now_s - 300)))
    stuck = recorded([*FORWARD, *FORWARD], start_s=now_s - 300)
    stuck[-1] = replace(stuck[-1], time_in_s=now_s + 60)
    path = dump(tmp_path, 0, HandmadeRecorder("tp:0 flagcx", (0, 1), [*stuck[:4], *_later(stuck[4:7], 320), stuck[7]]))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"time_s": now_s + 60 + waited_s}))
    found = compare(choose_dumps([tmp_path]).dumps).differences
    if waited_s < 1:
        assert found == ()
        return
    (difference,) = found
    assert (difference.kind, difference.number, difference.who) == (Kind.NO_RECORD, 8, (1,))
    assert difference.words == (
        "rank 1 left no dump: gone, or stopped; what rank 1 wrote was written before the others entered the call"
    )


def _later(calls: Sequence[RecordedCall], by_s: float) -> list[RecordedCall]:
    return [replace(call, time_in_s=call.time_in_s + by_s, time_out_s=call.time_in_s + by_s + 0.5) for call in calls]


def test_what_only_some_ranks_still_keep_is_not_compared(tmp_path: Path) -> None:
    """Given rings that begin at calls 1 and 5, then calls 5 to 8 are compared, by their numbers."""
    dump(tmp_path, 0, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded([*FORWARD, *FORWARD])))
    dump(tmp_path, 1, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD, first=5)))
    assert compare(choose_dumps([tmp_path]).dumps).differences == ()


def test_a_rank_far_behind_what_the_others_keep_is_missing(tmp_path: Path) -> None:
    """Given a rank that stopped at call 4, and one whose ring has 9 to 12, then it is missing from the first kept."""
    dump(tmp_path, 0, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD, first=9)))
    dump(tmp_path, 1, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD, done=True)))
    difference = single(compare(choose_dumps([tmp_path]).dumps))
    assert (difference.kind, difference.number, difference.who) == (Kind.MISSING, 9, (1,))
    assert "rank 1's last was call 4, broadcast int64[4] rank 0" in difference.words


def test_a_send_and_its_receive_are_one_transfer(tmp_path: Path) -> None:
    """Given a direction's send on one rank and receive on the other, then they are equal; another size is not."""
    for count, kinds in ((64, []), (32, [Kind.SHAPE])):
        for rank, (operation, peer) in enumerate((("send", 1), ("recv", 0))):
            sequence: list[Call] = [(operation, count if rank else 64, "float32", peer, 50)]
            dump(tmp_path, rank, HandmadeRecorder("pp:0 torch 0>1", (0, 1), recorded(sequence)))
        assert [each.kind for each in compare(choose_dumps([tmp_path]).dumps).differences] == kinds


# --- groups of one name ---


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("differs_in", [None, 1, 2])
def test_two_groups_of_one_name_and_ranks_are_compared_each_with_itself(
    tmp_path: Path, is_named: bool, differs_in: int | None
) -> None:
    """Given two living groups that both have the default name, in one order on rank 0 and in the other on rank 1, or in
    the same where nobody has named them, then each is compared with itself, and said which one differs."""
    for rank in (0, 1):
        sequences = {1: [EMBED, ATTENTION], 2: [GATHER, TELL, GATHER]}
        if rank == 1 and differs_in is not None:
            sequences[differs_in][1] = ("all_reduce", 64, "int32", None, 20)
        calls = {number: recorded(sequence, done=True) for number, sequence in sequences.items()}
        groups = [
            made(number, calls[number]) if is_named else HandmadeRecorder("anonymous torch", (0, 1), calls[number])
            for number in ((2, 1) if is_named and rank == 1 else (1, 2))
        ]
        dump(tmp_path, rank, *groups)
    found = compare(choose_dumps([tmp_path]).dumps).differences
    which = "made as number" if is_named else "record"
    expected = [] if differs_in is None else [(f"anonymous torch ({which} {differs_in})", 2)]
    assert [(each.group, each.number) for each in found] == expected
    result = invoke(tmp_path)
    assert result.exit_code == len(expected)
    assert "the ranks' calls are equal: 2 record(s)" in result.output or expected


def test_records_of_one_name_are_told_apart_in_words() -> None:
    """Given what the monitor names recorders by, then those that share a name say which one they are, and one that
    shares it with none, or only with one of other ranks, is called by its name."""
    name, ranks = "tp:0 torch", (0, 1)
    words = {"1": "made as number 1", "2": "made as number 2", "2#3": "made as number 2, record 3", "0#2": "record 2"}
    keys = {Key(name, ranks, f"{name} [0, 1] {number}"): text for number, text in words.items()}
    keys[Key(name, ranks)] = "record 1"
    others = [Key(name, (0, 2), f"{name} [0, 2] 2"), Key("pp:0 torch", ranks, "pp:0 torch [0, 1] 2")]
    assert told_apart([*keys, *others, *others]) == {
        **{key: f"{name} ({text})" for key, text in keys.items()},
        **{key: key.name for key in others},
    }


def test_a_call_of_another_group_of_that_name_is_where_a_rank_was(tmp_path: Path) -> None:
    """Given a rank that is missing from a call since it is in one of the other group of the same name, then the words
    say of which of the two."""
    dump(tmp_path, 0, made(1, recorded(FORWARD[:2])), made(2, recorded(FORWARD[:1], done=True)))
    dump(tmp_path, 1, made(1, recorded(FORWARD[:1], done=True)), made(2, recorded(FORWARD[:2])))
    found = {each.group: each.words for each in compare(choose_dumps([tmp_path]).dumps).differences}
    for own, other, who in ((1, 2, 1), (2, 1, 0)):
        words = found[f"anonymous torch (made as number {own})"]
        assert f"rank {who} was in call 2 of anonymous torch (made as number {other}), all_reduce" in words


@pytest.mark.parametrize("differs", [False, True])
def test_a_group_that_was_made_again_is_another_one(tmp_path: Path, differs: bool) -> None:
    """Given a group that was destroyed and made again under its name, and rank 1 whose latest dump is from before, then
    its calls are compared with what the others called in the first one."""
    first = recorded(FORWARD[:3], done=True)
    own = [*first[:2], replace(first[2], count=96)] if differs else first
    second = made(2, recorded([TELL], done=True))
    earlier = dump(tmp_path, 0, made(1, first))
    dump(tmp_path, 1, made(1, own))
    latest = dump(tmp_path, 0, second)
    chosen = choose_dumps([tmp_path])
    found = compare(chosen.dumps)
    expected = [("anonymous torch (made as number 1)", 3)] if differs else []
    assert [(each.group, each.number) for each in found.differences] == expected
    assert chosen.left_out == (
        f"{earlier.name}: there is a later one of rank 0, {latest.name}; from the earlier one is taken what that no "
        "longer has, the calls of anonymous torch (made as number 1)",
    )
    assert invoke(tmp_path).exit_code == differs


# --- files ---


def test_of_a_folder_the_latest_dump_of_each_rank_counts(tmp_path: Path) -> None:
    """Given dumps of an earlier time, of another run and of yesterday, then they are left out, and that is said."""
    old = dump(tmp_path, 1, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded([GATHER])))
    paths = [dump(tmp_path, rank, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD))) for rank in (0, 1, 0, 1)]
    for path, change in ((old, {"time_s": time.time() - 3600}), (paths[0], {"meeting": "TCPStore port 1"})):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    chosen = choose_dumps([tmp_path])
    assert [one.path for one in chosen.dumps] == paths[2:]
    reasons = dict(line.split(": ", 1) for line in chosen.left_out)
    assert reasons[old.name] == "3600 s older than the latest"
    assert reasons[paths[0].name].startswith("of another run: its ranks met at 'TCPStore port 1'")
    assert reasons[paths[1].name] == f"there is a later one of rank 1, {paths[3].name}"


def test_what_a_rank_had_given_up_by_its_latest_dump_is_taken_from_the_one_before(tmp_path: Path) -> None:
    """Given a rank that left a dump, gave one of its groups up and left another, while the other rank is in a call of
    that group, then what it called is compared as it was in the first, and its other group as in the second; where it
    was instead is as it was in the first, too."""
    one = HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD[:3], done=True))
    two = HandmadeRecorder("pp:0 flagcx", (0, 1), recorded(FORWARD[:3]))
    waits = HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD))
    went_on = HandmadeRecorder("pp:0 flagcx", (0, 1), recorded(FORWARD))
    dump(tmp_path, 0, waits, went_on)
    first, second = dump(tmp_path, 1, one, two), dump(tmp_path, 1, went_on)
    chosen = choose_dumps([tmp_path])
    difference = single(compare(chosen.dumps))
    assert (difference.group, difference.kind, difference.number) == ("tp:0 flagcx", Kind.MISSING, 4)
    assert difference.who == (1,) and "rank 1 was in call 3 of pp:0 flagcx, all_gather" in difference.words
    assert chosen.left_out == (
        f"{first.name}: there is a later one of rank 1, {second.name}; from the earlier one is taken what that no "
        "longer has, the calls of tp:0 flagcx",
    )


def test_where_a_rank_was_may_be_a_group_that_nobody_has_any_more(tmp_path: Path) -> None:
    """Given a rank whose call of another group was under way in the dump that its record is from, and that gave both
    groups up, then that call is where it was."""
    dump(tmp_path, 0, made(1, recorded(FORWARD)))
    dump(tmp_path, 1, made(1, recorded(FORWARD[:3], done=True)), made(1, recorded([TELL]), "pp:0 torch"))
    dump(tmp_path, 1)
    words = single(compare(choose_dumps([tmp_path]).dumps)).words
    assert words.startswith("rank 1 did not enter it; rank 1 was in call 1 of pp:0 torch, broadcast int64[4] rank 0 at")


@pytest.mark.parametrize("change", [{"pid": 1}, {"host": "elsewhere"}, None])
def test_what_all_have_given_up_or_another_process_did_is_not_taken(
    tmp_path: Path, change: dict[str, object] | None
) -> None:
    """Given an earlier dump of another process, or on request of a group that no later dump has, which may have been in
    the midst of a call, then nothing of it is taken."""
    waiting = HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD))
    other = HandmadeRecorder("pp:0 flagcx", (0, 1), recorded(FORWARD, done=True))
    first = dump(tmp_path, 1, waiting)
    first.write_text(json.dumps(json.loads(first.read_text()) | (change or {})))
    second = dump(tmp_path, 1, other)
    dump(tmp_path, 0, *([waiting] if change else []), other)
    chosen = choose_dumps([tmp_path])
    assert chosen.left_out == (f"{first.name}: there is a later one of rank 1, {second.name}",)
    assert [each.kind for each in compare(chosen.dumps).differences] == [Kind.NO_RECORD] * (change is not None)


@pytest.mark.parametrize("is_fork", [True, False])
def test_a_fork_without_groups_hides_nothing_of_its_rank(tmp_path: Path, is_fork: bool) -> None:
    """Given a later dump without records, then it is left out where it is a fork's, and the rank's calls are compared;
    where it is the same process, which has given everything up, it is the rank's latest."""
    for rank in (0, 1):
        dump(tmp_path, rank, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD[: 4 - rank], done=True)))
    late = dump(tmp_path, 0)
    pid = json.loads(late.read_text())["pid"]
    if is_fork:
        late.write_text(json.dumps(json.loads(late.read_text()) | {"pid": pid + 1}))
    chosen = choose_dumps([tmp_path])
    assert [each.number for each in compare(chosen.dumps).differences] == [4]
    assert (chosen.dumps[0].path == late) == (not is_fork)
    (left_out,) = chosen.left_out
    words = f"{late.name}: its process, {pid + 1}, never had a group, as that of rank 0 (pid {pid} on "
    assert left_out.startswith(words) == is_fork


def test_forks_alone_are_dumps_without_groups(tmp_path: Path) -> None:
    """Given only dumps without records, then the latest of the rank counts, and there is nothing to compare."""
    first, second = dump(tmp_path, 0), dump(tmp_path, 0)
    chosen = choose_dumps([tmp_path])
    assert [each.path for each in chosen.dumps] == [second]
    assert chosen.left_out == (f"{first.name}: there is a later one of rank 0, {second.name}",)
    assert invoke(tmp_path).exit_code == 2


def verdict_text(name: str, ranks: tuple[int, ...] = (0, 1)) -> str:
    """What the monitor gives as the reason of its dump."""
    stuck = Stuck(name, ranks, "number 4, broadcast int64[4] rank 0", "/srv/model.py:40 forward", 5.0, 5.0)
    return Verdict(0, stuck).text()


@pytest.mark.parametrize(
    ("calls", "reason", "is_found"),
    [
        (failed(recorded(FORWARD)), "on request", True),
        (recorded(FORWARD), verdict_text("tp:0 torch"), True),
        (recorded(FORWARD), verdict_text("tp:0 torch 0>1"), False),
        (recorded(FORWARD), f"global rank 2 found: {verdict_text('tp:0 torch', (2, 3))}", False),
        (recorded(FORWARD), "on request", False),
        (recorded(FORWARD, done=True), verdict_text("tp:0 torch"), False),
    ],
    ids=["failed", "found to hang", "another hangs", "one of other ranks hangs", "under way", "returned"],
)
def test_what_all_have_given_up_after_a_failure_is_taken(
    tmp_path: Path, calls: Sequence[RecordedCall], reason: str, is_found: bool
) -> None:
    """Given a group that both ranks had given up by their latest dumps, and an earlier one that shows that a call of it
    failed, or was written for it, then its calls are compared as each rank's last dump with it has them; of a group
    that may have ended in good order nothing is taken."""
    went_on = made(1, recorded(FORWARD, done=True), "dp:0 torch")
    dump(tmp_path, 1, made(1, recorded(FORWARD[:2], done=True), "tp:0 torch"))  # not the last one that has it
    earlier = [
        dump(tmp_path, 0, made(1, calls, "tp:0 torch"), reason=reason),
        dump(tmp_path, 1, made(1, recorded(FORWARD[:3], done=True), "tp:0 torch"), reason="an answer"),
    ]
    for rank in (0, 1):
        dump(tmp_path, rank, went_on)
    chosen = choose_dumps([tmp_path])
    found = compare(chosen.dumps).differences
    assert [(each.group, each.kind, each.number, each.who) for each in found] == (
        [("tp:0 torch", Kind.MISSING, 4, (1,))] if is_found else []
    )
    assert invoke(tmp_path).exit_code == is_found
    taken = "from the earlier one is taken what that no longer has, the calls of tp:0 torch"
    assert [line.partition(":")[0] for line in chosen.left_out if line.endswith(taken)] == (
        [path.name for path in reversed(earlier)] if is_found else []
    )


def test_who_wrote_nothing_of_a_failed_call_before_the_group_was_given_up_is_named(tmp_path: Path) -> None:
    """Given a rank whose last dump with a failed group is from before the others entered the call, and a later one
    without it, then it is not said to have left no dump."""
    now_s = time.time()
    calls = failed(recorded(FORWARD, start_s=now_s + 60))
    before = [*_later(recorded(FORWARD[:3], done=True), now_s - 60 - LONG_AGO_S), calls[3]]
    dump(tmp_path, 1, made(1, before[:3], "tp:0 torch"))
    paths = [dump(tmp_path, 0, made(1, before, "tp:0 torch")), *(dump(tmp_path, rank) for rank in (0, 1))]
    for path in paths:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"time_s": now_s + 120}))
    difference = single(compare(choose_dumps([tmp_path]).dumps))
    assert (difference.kind, difference.number, difference.who) == (Kind.NO_RECORD, 4, (1,))
    assert difference.words == (
        "rank 1 has no record of this call; what rank 1 wrote of the group was written before the others entered the "
        "call, and later the group was given up"
    )


def test_a_failure_that_is_too_old_to_be_compared_is_mentioned(tmp_path: Path) -> None:
    """Given a dump of a failed call that is older than what is compared, then the line that leaves it out says so."""
    old = dump(tmp_path, 0, made(1, failed(recorded(FORWARD)), "tp:0 torch"), made(1, recorded(FORWARD), "dp:0 torch"))
    old.write_text(json.dumps(json.loads(old.read_text()) | {"time_s": time.time() - 3600}))
    for rank in (0, 1):
        dump(tmp_path, rank, made(1, recorded(FORWARD, done=True), "dp:0 torch"))
    (left_out,) = choose_dumps([tmp_path]).left_out
    shows = "it shows a failed call of tp:0 torch: compare the files of that time"
    assert left_out == f"{old.name}: 3600 s older than the latest; {shows}"


def test_a_run_at_the_same_port_is_told_by_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given dumps of two runs that met at one place, then only those with the latest one's word are compared."""
    recorder = HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD))
    for word, ranks in (("first", (0, 1)), ("second", (0,))):
        monkeypatch.setattr(dumps, "run_word", lambda word=word: word)
        for rank in ranks:
            write_dump("time-out", [recorder], tmp_path, rank=rank, meeting="TCPStore port 5")
    chosen = choose_dumps([tmp_path])
    assert [(one.rank, one.meeting) for one in chosen.dumps] == [(0, "TCPStore port 5, run second")]
    assert all("of another run: its ranks met at 'TCPStore port 5, run first'" in line for line in chosen.left_out)
    assert single(compare(chosen.dumps)).words == "rank 1 left no dump: gone, or stopped"


@pytest.mark.parametrize("has_word", [False, True])
def test_without_a_word_what_was_written_before_the_first_call_is_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_word: bool
) -> None:
    """Given a dump that is older than the first call of the latest one, then it is another run's, unless both have the
    word of one run: then the latest one's rank was late."""
    monkeypatch.setattr(dumps, "run_word", lambda: "one" * has_word)
    path = dump(tmp_path, 1, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD)))
    calls = recorded(FORWARD, start_s=time.time() + 5)
    late = dump(tmp_path, 0, HandmadeRecorder("tp:0 flagcx", (0, 1), calls))
    late.write_text(json.dumps(json.loads(late.read_text()) | {"time_s": time.time() + 60}))
    chosen = choose_dumps([tmp_path])
    assert [one.rank for one in chosen.dumps] == ([0, 1] if has_word else [0])
    earlier = rf"{re.escape(path.name)}: of an earlier run: it was written \d\.\d s before the first call of the latest"
    assert [bool(re.fullmatch(earlier, line)) for line in chosen.left_out] == [True] * (not has_word)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as a dump of calls"),
        (b"\xff\xfe", "cannot be read as a dump of calls"),
        (b"[]", "its format is None, this reads 1"),
        (b'{"format": 2}', "its format is 2, this reads 1"),
        (b'{"format": 1}', "damaged dump of calls: lacks host, meeting, pid, rank, reason, recorders"),
        (b'{"format": %s}' % (b"9" * 5000), "cannot be read as a dump of calls: Exceeds the limit"),
        (b'{"format": 1, "time_s": NaN}', "cannot be read as a dump of calls: NaN is no finite number"),
        (b'{"format": 1, "time_s": 1e999}', "cannot be read as a dump of calls: 1e999 is no finite number"),
        (b"[" * 100_000, "cannot be read as a dump of calls"),
    ],
    ids=reprlib.repr,
)
def test_a_file_that_is_no_dump_is_an_error_that_names_it(tmp_path: Path, content: bytes, words: str) -> None:
    """Given something else, then the error says which file and what is wrong."""
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableDumpError, match=str(path)) as caught:
        read_dump(path)
    assert words in str(caught.value)


Way = tuple[str | int, ...]
FIRST_CALL: Way = ("recorders", 0, "calls", 0)
TEXT_FOR_NUMBER = "is '7'; allowed is a whole number from"
LAST_SECOND = "allowed is seconds since 1970, from 0 to below 253402300800"


def good_document(folder: Path, rank: int = 0) -> dict[str, Any]:
    """What a process wrote that was in its second call."""
    path = dump(folder, rank, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD[: 4 - rank])))
    document: dict[str, Any] = json.loads(path.read_text())
    document["threads"] = [{"name": "MainThread", "stack": ["a.py"]}]
    return document


def changed(document: dict[str, Any], path: Way, value: object) -> None:
    """Put ``value`` where ``path`` leads; take what is there away if it is ``GONE``."""
    *outer, last = path
    place: Any = document
    for key in outer:
        place = place[key]
    if value is GONE:
        del place[last]
    else:
        place[last] = value


GONE: Any = SimpleNamespace(is_gone=True)  # its text is the same in each process: pytest names cases by it


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("time_s",), "now", f"time_s is 'now'; {LAST_SECOND}"),
        (("time_s",), -(2**63), f"time_s is -9223372036854775808; {LAST_SECOND}"),
        (("recorders",), {}, "recorders is {}; allowed is a list of 0 or more"),
        (("recorders", 0), None, "recorders[0] is None; allowed is an object with name, ranks"),
        (("recorders", 0, "ranks"), [], "recorders[0].ranks is []; allowed is a list of 1 or more"),
        (("recorders", 0, "ranks", 1), True, "recorders[0].ranks[1] is True; allowed is a whole number from 0"),
        (("recorders", 0, "key"), 7, "recorders[0].key is 7; allowed is a text of whole characters"),
        (("recorders", 0, "entered"), 9, "recorders[0].calls have the numbers [1, 2, 3, 4]; allowed is each up to"),
        (("recorders", 0, "calls", 1), GONE, "recorders[0].calls have the numbers [1, 3, 4]; allowed is each up to"),
        (("recorders", 0, "under_way", "number"), {}, "recorders[0].under_way.number is {}; allowed is a whole number"),
        (("recorders", 0, "under_way", "number"), 5, "recorders[0].under_way.number is 5; allowed is a number up to"),
        ((*FIRST_CALL, "place"), [1], "calls[0].place is [1]; allowed is a text"),
        ((*FIRST_CALL, "error"), [[]], "calls[0].error is [[]]; allowed is a text"),
        ((*FIRST_CALL, "operation"), "é\ud800", "calls[0].operation is 'é\\ud800'; allowed is a text of whole char"),
        ((*FIRST_CALL, "peer"), {}, "calls[0].peer is {}; allowed is a whole number from 0"),
        ((*FIRST_CALL, "number"), "7", f"calls[0].number {TEXT_FOR_NUMBER} 1"),
        ((*FIRST_CALL, "number"), 1.5, "calls[0].number is 1.5; allowed is a whole number from 1"),
        ((*FIRST_CALL, "captured"), 0, "calls[0].captured is 0; allowed is true or false"),
        ((*FIRST_CALL, "time_in_s"), 1e300, f"calls[0].time_in_s is 1e+300; {LAST_SECOND}"),
        ((*FIRST_CALL, "time_in_s"), None, f"calls[0].time_in_s is None; {LAST_SECOND}"),
        ((*FIRST_CALL, "time_out_s"), "", f"calls[0].time_out_s is ''; {LAST_SECOND}"),
        ((*FIRST_CALL, "captured"), GONE, "calls[0] lacks captured"),
        ((*FIRST_CALL, "colour"), 1, "calls[0] has 'colour', which no dump of this format has"),
    ],
    ids=reprlib.repr,
)
def test_a_damaged_field_is_named(tmp_path: Path, path: Way, value: object, words: str) -> None:
    """Given a dump of which one field holds what it may not, then the error says which, what it holds and what it may,
    and the command ends with 2."""
    document = good_document(tmp_path)
    changed(document, path, value)
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(document))
    with pytest.raises(UnreadableDumpError) as caught:
        read_dump(file)
    assert f"{file} is a damaged dump of calls: " in str(caught.value) and words in str(caught.value)
    result = invoke(file)
    assert result.exit_code == 2 and "is a damaged dump of calls: " in result.output


def test_a_dump_from_before_recorders_had_keys_is_read(tmp_path: Path) -> None:
    """Given dumps without keys, then their records are compared by name and ranks."""
    for rank in (0, 1):
        document = good_document(tmp_path, rank)
        changed(document, ("recorders", 0, "key"), GONE)
        (tmp_path / f"{rank}.json").write_text(json.dumps(document))
    (dump_0, dump_1) = (read_dump(tmp_path / f"{rank}.json") for rank in (0, 1))
    assert list(dump_0.records) == list(dump_1.records) == [Key("tp:0 flagcx", (0, 1), "")]
    difference = single(compare([dump_0, dump_1]))
    assert (difference.group, difference.kind, difference.number) == ("tp:0 flagcx", Kind.MISSING, 4)


def test_every_field_that_is_written_has_a_kind(tmp_path: Path) -> None:
    """Given what is written into a dump, then the table of kinds has each of its fields and no other, so that a new one
    cannot be read unchecked, and a dump as it is written is no damaged one."""
    written = json.loads(dump(tmp_path, 0, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD))).read_text())
    assert damage(written) == ""
    (record,) = written["recorders"]
    found = [list(written), list(record), list(record["calls"][0]), list(written["threads"][0])]
    assert [sorted(each) for each in found] == [sorted(table) for table in (DUMP, RECORD, CALL, THREAD)]


STRANGE: tuple[object, ...] = (
    None, True, -1, 0, 1, 1.5, 2**40, 2**70, -(2**63), 1e308, -1e300, "", "1", "x" * 10, "é\ud800", "\x1b[31m", [],
    {}, [1], [[]], {"a": 1}, GONE,
)  # fmt: skip


def places(value: object, path: Way = ()) -> Iterator[Way]:
    """Where there is something in a document."""
    items: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def test_the_command_ends_with_a_verdict_whatever_is_in_a_dump(tmp_path: Path) -> None:
    """Given two ranks' dumps, when each place of the first holds each of many strange values, then it is read as a dump
    or it is a damaged one, and what is read is compared and printed: no other error comes up."""
    texts = [json.dumps(good_document(tmp_path, rank)) for rank in (0, 1)]
    files = [tmp_path / f"{rank}.json" for rank in (0, 1)]
    files[1].write_text(texts[1])
    codes: Counter[int] = Counter()
    for path in places(json.loads(texts[0])):
        for value in STRANGE:
            document = json.loads(texts[0])
            changed(document, path, value)
            files[0].write_text(json.dumps(document))
            result, as_json = invoke(*files), invoke("--json", *files)
            for error in (result.exception, as_json.exception):
                assert error is None or isinstance(error, SystemExit), (path, value, error)
            assert result.exit_code == as_json.exit_code
            assert result.exit_code != 2 or re.search(
                "damaged dump of|this reads 1|nothing was compared", result.output
            )
            codes[result.exit_code] += 1
    assert set(codes) == {0, 1, 2} and codes[1] > 100 and codes[2] > 100


# --- the command ---


def invoke(*arguments: object) -> Result:
    """``python -m sglang_fl comm-diff ...``."""
    return CliRunner().invoke(commands, ["comm-diff", *map(str, arguments)], prog_name="python -m sglang_fl")


def test_the_command_ends_with_0_where_all_is_equal(tmp_path: Path) -> None:
    """Given equal dumps, then each rank's line and the verdict are printed, and the exit code is 0."""
    compared(tmp_path, FORWARD, FORWARD)
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    assert "rank 0" in result.output and "rank 1" in result.output
    assert "the ranks' calls are equal" in result.output


def test_the_command_ends_with_1_and_names_the_call_where_they_differ(tmp_path: Path) -> None:
    """Given a skipped call, then group, number, rank, both sides and the time are printed, and the exit code is 1."""
    compared(tmp_path, [*FORWARD, *FORWARD], [*FORWARD, *FORWARD[1:]])
    result = invoke(*tmp_path.iterdir())
    assert result.exit_code == 1, result.output
    assert "tp:0 flagcx, ranks 0 and 1: call 5 is the first in which they differ" in result.output
    assert "rank 1 skipped call 5: all_reduce float32[64] at /srv/model.py:10 forward" in result.output


def test_the_command_has_the_same_as_json(tmp_path: Path) -> None:
    """Given --json, then one object with dumps, differences and notes; the exit code stays."""
    compared(tmp_path, [*FORWARD, EMBED], FORWARD)
    result = invoke(tmp_path, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert [one["rank"] for one in document["dumps"]] == [0, 1]
    (difference,) = document["differences"]
    assert (difference["kind"], difference["number"], difference["who"]) == ("missing", 5, [1])
    assert difference["calls"]["1"] is None and difference["calls"]["0"]["operation"] == "all_reduce"


def test_the_command_ends_with_2_where_nothing_can_be_read(tmp_path: Path) -> None:
    """Given no dump, a missing path or a broken file, then the error is printed and the exit code is 2."""
    for path in (tmp_path, tmp_path / "missing.json"):
        result = invoke(path)
        assert result.exit_code == 2 and str(path) in result.output
    assert invoke().exit_code == 2
    alone = dump(tmp_path, 0, HandmadeRecorder("tp:0 flagcx", (0, 1), recorded(FORWARD, done=True)))
    result = invoke(alone)
    assert result.exit_code == 2 and "nothing was compared" in result.output
    (tmp_path / "sglang_fl-comm-x.json").write_text("{")
    result = invoke(tmp_path)
    assert result.exit_code == 2 and "cannot be read as a dump" in result.output
