"""``python -m sglang_fl comm-diff``: what the ranks' dumps of recorded calls say about who did what instead."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sglang_fl.comm.difference import Comparison, Difference
    from sglang_fl.comm.dump_files import Chosen, Dump
    from sglang_fl.comm.recorder import RecordedCall

LONGEST_ERROR = 160  # --json has it whole
EQUAL, DIFFER, UNREADABLE = 0, 1, 2


@click.command("comm-diff")
@click.argument("dumps", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output, for programs.")
@click.pass_context
def command(context: click.Context, dumps: Sequence[Path], as_json: bool) -> None:
    """Compare the ranks' dumps of their last communication calls, and name the first call in which they differ.

    \b
    DUMPS are files, or folders, of which the latest run's latest dump of each rank is taken, and earlier ones for
    the calls of a group that failed and was given up since. A process writes one into SGLANG_FL_COMM_DUMP_DIR when
    a call does not end in time, and whenever it gets SIGUSR1:
      pkill -USR1 -f sglang::scheduler

    \b
    Named are: a rank that did not enter a call, and where it was; one that skipped a call; two calls that were
    swapped; another operation, root, dtype or shape; a rank that left no dump.

    Exit code 0: the calls are equal. 1: they differ. 2: nothing to compare, or a dump cannot be read.

    \b
    Examples:
      python -m sglang_fl comm-diff /tmp/sglang_fl-0
      python -m sglang_fl comm-diff node0/*.json node1/*.json
    """
    from sglang_fl.comm.difference import compare
    from sglang_fl.comm.dump_files import UnreadableDumpError, choose_dumps

    try:
        chosen = choose_dumps(dumps)
    except UnreadableDumpError as error:
        click.echo(_printable(str(error)), err=True)
        context.exit(UNREADABLE)
    found = compare(chosen.dumps)
    if as_json:
        click.echo(json.dumps(_as_json(chosen, found), indent=1))
    else:
        for line in _lines(chosen, found):
            click.echo(_printable(line))
    if found.differences:
        context.exit(DIFFER)
    context.exit(EQUAL if _shared(chosen.dumps) else UNREADABLE)


def _printable(line: str) -> str:
    """A dump's texts and files' names may hold what moves a terminal's cursor, and bytes that are no text."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def _lines(chosen: Chosen, found: Comparison) -> Iterator[str]:
    for dump in chosen.dumps:
        calls = sum(record.entered for record in dump.records.values())
        yield f"{dump}, {_clock(dump.time_s)}: {calls} call(s), {dump.reason.partition(chr(10))[0]}"
    yield ""
    for difference in found.differences:
        yield from _difference_lines(difference)
        yield ""
    if not found.differences:
        yield _equal(chosen.dumps)
    for note in found.notes:
        yield f"note: {note}"
    for line in chosen.left_out:
        yield f"left out: {line}"


def _difference_lines(difference: Difference) -> Iterator[str]:
    from sglang_fl.comm.difference import in_words

    ranks = in_words(difference.ranks)
    yield f"{difference.group}, {ranks}: call {difference.number} is the first in which they differ"
    yield f"  {difference.words}"
    for rank, call in difference.calls.items():
        yield f"  rank {rank}: {'not in it' if call is None else _call_words(call)}"


def _call_words(call: RecordedCall) -> str:
    place = f" at {call.place}" if call.place else ""
    if call.error:
        end = f"failed after {_elapsed(call)}: {shorten(call.error, LONGEST_ERROR, placeholder=' ...')}"
    else:
        end = "had not returned" if call.time_out_s is None else f"returned after {_elapsed(call)}"
    captured = ", captured into a graph" if call.captured else ""
    return f"{call.what()}{place}, entered {_clock(call.time_in_s)}, {end}{captured}"


def _elapsed(call: RecordedCall) -> str:
    return "an unknown time" if call.time_out_s is None else f"{1e3 * (call.time_out_s - call.time_in_s):.3f} ms"


def _clock(time_s: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(time_s))}.{int(time_s % 1 * 1000):03d}"


def _equal(dumps: Sequence[Dump]) -> str:
    shared = _shared(dumps)
    if not shared:
        return f"nothing was compared: no group is in more than one of {len(dumps)} dump(s)"
    return f"the ranks' calls are equal: {shared} record(s) of groups on {len(dumps)} rank(s)"


def _shared(dumps: Sequence[Dump]) -> int:
    """How many recorders are in the dumps of more than one rank."""
    keys = {key for dump in dumps for key in dump.records}
    return sum(sum(key in dump.records for dump in dumps) > 1 for key in keys)


def _as_json(chosen: Chosen, found: Comparison) -> dict[str, Any]:
    return {
        "dumps": [
            {"path": str(d.path), "rank": d.rank, "host": d.host, "pid": d.pid, "time_s": d.time_s, "reason": d.reason}
            for d in chosen.dumps
        ],
        "differences": [
            {
                "group": each.group,
                "ranks": each.ranks,
                "number": each.number,
                "kind": each.kind.value,
                "who": each.who,
                "words": each.words,
                "calls": {rank: None if call is None else call.row() for rank, call in each.calls.items()},
            }
            for each in found.differences
        ],
        "notes": found.notes,
        "left_out": chosen.left_out,
    }
