"""The sweep of layer 1 without a GPU: recording, inputs, errors, the rule, and a worker that dies or hangs."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import reprlib
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
import yaml
from click.testing import CliRunner

from sglang_fl.aten import gems
from sglang_fl.aten.gems import Entry, Gems
from sglang_fl.aten.layer import STORED_TABLES
from sglang_fl.aten.plan import NameResolver
from sglang_fl.aten.sweep import origin, probes
from sglang_fl.aten.sweep.cases import ACCELERATOR, HOST, Case, CaseFile, CaseFileError, merge_cases, read_cases
from sglang_fl.aten.sweep.errors import compare
from sglang_fl.aten.sweep.inputs import Call
from sglang_fl.aten.sweep.partial import Partial, SweepError
from sglang_fl.aten.sweep.recorder import Recorder
from sglang_fl.aten.sweep.results import ALLOWED_RATIO, NOT_REACHED, Result, Table, TableError, sort_results
from sglang_fl.aten.sweep.run import Job, Limits, choose, run
from sglang_fl.aten.sweep.yaml_list import ListError, write_list
from sglang_fl.cli.aten_sweep import HOST_SHAPES, PROBES, SHAPES
from sglang_fl.cli.frame import commands
from sglang_fl.config.loader import CONFIG_DIR
from sglang_fl.config.yaml_file import read_yaml

CPU = torch.device("cpu")
ORIGIN = {"flag_gems": "5.0.2", "card": "NVIDIA H200", "torch": "2.11.0"}


def record(function: object, *tensors: torch.Tensor) -> dict[str, Case]:
    """The calls that ``function`` makes, by operator."""
    recorder = Recorder("cpu")
    with torch.inference_mode(), recorder, recorder.phase("decode_1"):
        function(*tensors)  # type: ignore[operator]
    return {case.operator: case for case in recorder.cases()}


class TestRecorder:
    """What is seen of a forward pass."""

    def test_calls_that_are_made_of_others_are_taken_apart(self) -> None:
        """Given inference mode, where linear arrives whole, when it is called, then its mm is recorded."""
        cases = record(torch.nn.functional.linear, torch.ones(2, 4), torch.ones(3, 4))
        assert "mm" in cases
        assert [arg["tensor"]["shape"] for arg in cases["mm"].args] == [[2, 4], [4, 3]]
        assert cases["mm"].args[1]["tensor"]["stride"] == [1, 4]

    def test_a_reshape_that_copies_is_recorded_as_its_copy(self) -> None:
        """Given a transposed tensor, when it is reshaped, then the clone and the copy beneath it are recorded."""
        cases = record(lambda tensor: tensor.t().reshape(-1), torch.ones(2, 3))
        assert {"clone", "copy_"} <= cases.keys()
        assert "view" not in cases

    def test_equal_calls_are_one_case_with_the_range_of_both(self) -> None:
        """Given two calls with indices 2..3 and 0..1, when recorded, then one case holds 0..3 and counts two calls."""
        weight = torch.ones(9, 2)

        def calls() -> None:
            torch.ops.aten.index_select(weight, 0, torch.tensor([2, 3]))
            torch.ops.aten.index_select(weight, 0, torch.tensor([0, 1]))

        case = record(calls)["index_select"]
        index = case.args[2]["tensor"]
        assert (index["low"], index["high"], case.phases) == (0, 3, {"decode_1": 2})

    def test_outside_a_phase_nothing_is_recorded(self) -> None:
        """Given no phase, when an operator is called, then there is no case."""
        recorder = Recorder("cpu")
        with recorder:
            torch.ones(2) + 1
        assert recorder.cases() == []

    def test_a_tensor_of_another_device_stays_on_the_host(self) -> None:
        """Given a model on cuda, when a tensor of the host is used, then its case says so."""
        recorder = Recorder("cuda")
        with recorder, recorder.phase("decode_1"):
            torch.ones(2).add(torch.ones(2))
        (case,) = (case for case in recorder.cases() if case.operator == "add.Tensor")
        assert {arg["tensor"]["device"] for arg in case.args} == {HOST}

    def test_a_file_of_cases_reads_back_as_it_was_written(self, tmp_path: Path) -> None:
        """Given cases with dtypes, infinities and lists, when written and read, then nothing has changed."""
        recorder = Recorder("cpu")
        with recorder, recorder.phase("decode_1"):
            torch.cat([torch.ones(2), torch.full((2,), -math.inf)]).to(torch.bfloat16)
        written = CaseFile({"model": "x"}, recorder.cases())
        written.write(tmp_path / "cases.json")
        assert read_cases(tmp_path / "cases.json") == written

    def test_a_file_that_is_none_is_named(self, tmp_path: Path) -> None:
        """Given a file of other JSON, when read, then the error names it and how to make one."""
        Path(tmp_path, "x.json").write_text("[1]")
        with pytest.raises(CaseFileError, match=r"x\.json is no file of recorded calls .*--record"):
            read_cases(tmp_path / "x.json")


class TestInputs:
    """Inputs that an operator accepts, of every recorded call."""

    def test_every_recorded_call_can_be_made_again_and_equals_itself(self) -> None:
        """Given the recording of the package, when each small call is made twice, then both results are the same."""
        recorded = merge_cases([read_cases(path) for path in (SHAPES, HOST_SHAPES, PROBES)])
        cases = [case for case in recorded.cases if sum_of_sizes(case) < 1 << 17]
        assert len(cases) > 50
        for case in cases:
            call = Call(case, CPU)
            if not call.is_random and "empty" not in case.operator:
                errors = compare(call, call.run(), call.run())
                assert not errors.differs, case.describe()
                assert errors.gems_error <= errors.allowed, case.describe()

    def test_shapes_strides_and_ranges_are_the_recorded_ones(self) -> None:
        """Given an index of 5..8 and a transposed weight, when inputs are made, then they are like that."""
        weight, index = tensor_data([4, 3], [1, 4], "bfloat16"), tensor_data([4], [1], "int64", 5, 8)
        call = Call(Case("index_select", [weight, 0, index], {}), CPU)
        assert call.args[0].stride() == (1, 4)
        assert call.args[0].dtype == torch.bfloat16
        # Each once: where places are written twice it is open which value stays.
        assert sorted(call.args[2].tolist()) == [5, 6, 7, 8]

    def test_what_a_call_changes_is_copied(self) -> None:
        """Given add_, when it runs twice, then both runs start from the same tensor."""
        data = tensor_data([3], [1], "float32")
        call = Call(Case("add_.Tensor", [data, data], {}), CPU)
        assert call.changes_arguments
        assert torch.equal(call.run()[0], call.run()[0])


class TestErrors:
    """The rule of error: twice PyTorch's own."""

    call = Call(
        Case("mul.Tensor", [{"tensor": {"shape": [64], "stride": [1], "dtype": "bfloat16", "device": HOST}}, 1.5], {}),
        CPU,
    )

    def test_pytorchs_own_result_passes(self) -> None:
        """Given the same result twice, when compared, then the error is within what is allowed."""
        errors = compare(self.call, self.call.run(), self.call.run())
        assert errors.reference == "float64"
        assert 0 < errors.gems_error <= errors.allowed

    def test_three_times_the_error_is_over_the_rule(self) -> None:
        """Given a result three roundings away, when compared, then its error is over what is allowed."""
        own = self.call.run()
        wrong = [tensor + 3 * tensor.abs().max() * torch.finfo(torch.bfloat16).eps for tensor in own]
        errors = compare(self.call, own, wrong)
        assert errors.gems_error > errors.allowed

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda tensor: tensor[:3], "shape"),
            (lambda tensor: tensor.float(), "dtype torch.float32 instead of torch.bfloat16"),
            (lambda tensor: torch.stack([tensor, tensor], 1)[:, 0], "strides [2] instead of [1]"),
        ],
    )
    def test_another_shape_dtype_or_stride_differs(self, change: object, text: str) -> None:
        """Given a result of another form, when compared, then the text says what differs."""
        own = self.call.run()
        assert text in compare(self.call, own, [change(tensor) for tensor in own]).differs  # type: ignore[operator]

    def test_a_nan_in_the_place_of_a_number_is_an_infinite_error(self) -> None:
        """Given one NaN, when compared, then the error is infinite and not overlooked."""
        own = self.call.run()
        wrong = [tensor.clone() for tensor in own]
        wrong[0][5] = math.nan
        assert compare(self.call, own, wrong).gems_error == math.inf

    def test_integers_must_be_equal(self) -> None:
        """Given argmax with one other index, when compared, then one place is wrong and none is allowed."""
        call = Call(Case("argmax", [tensor_data([4, 9], [9, 1], "float32"), -1], {}), CPU)
        own = call.run()
        wrong = [own[0].clone()]
        wrong[0][2] += 1
        errors = compare(call, own, wrong)
        assert (errors.reference, errors.gems_error, errors.allowed) == ("torch", 1.0, 0.0)

    def test_random_numbers_are_not_compared(self) -> None:
        """Given multinomial, when compared, then it differs: another stream gives other tokens."""
        call = Call(Case("multinomial", [tensor_data([2, 5], [5, 1], "float32", 0, 1), 1], {}), CPU)
        assert "random" in compare(call, call.run(), call.run()).differs


class TestRule:
    """Which operators are good."""

    def test_in_graphs_the_calls_that_are_not_slower_are_taken(self) -> None:
        """Given a call at 0.5 x and a larger one over the limit, then the operator is good for the first alone."""
        slow = result("softmax", ratio=ALLOWED_RATIO + 0.001, phases="decode_8:3", calls=3, size=1000)
        table = Table(ORIGIN, [result("softmax", ratio=0.5), slow, result("cat", ratio=ALLOWED_RATIO)])
        assert table.verified() == ["cat", "softmax"]
        assert table.call_share() == (4, 7)
        assert "1.021 x" in table.excluded()["softmax"][0]
        assert Table(ORIGIN, [slow]).verified() == []

    def test_outside_of_graphs_all_calls_together_must_save_more_than_they_cost(self) -> None:
        """Given a prefill call that saves 50 us and many small ones, then the small ones' number decides."""
        for small, eager in ((10, ["sort"]), (100, [])):
            rows = [
                result("sort", ratio=0.5, phases="prefill_4096:1", size=1000),
                result("sort", ratio=0.99, phases=f"decode_1_replay:{small}", calls=small),
            ]
            table = Table(ORIGIN, rows)
            assert table.eager() == eager
            assert table.verified() == eager
            assert table.called() == eager
        assert Table(ORIGIN, [result("sort", ratio=0.97, phases="prefill_4096:1")]).eager() == []

    def test_a_steps_calls_are_told_from_those_of_its_replay_and_of_sampling(self) -> None:
        """Given phases, then a graph holds a step's calls less the replay's; the rest is outside."""
        one = result("cat", phases="decode_1:5 decode_1_replay:2 decode_1_sampled:7 prefill_4096:3")
        assert (one.calls_in_graphs(), one.eager_calls()) == (3, 7)
        assert result("cat", phases="empty_decode_8:4").calls_in_graphs() == 4

    def test_matrix_products_are_never_taken(self) -> None:
        """Given an mm that is faster, then it is not taken: its time follows its shape, not its size."""
        assert Table(ORIGIN, [result("mm", ratio=0.5)]).verified() == []

    def test_garbled_values_exclude_all_forms_and_a_failure_on_nothing_none(self) -> None:
        """Given a garbled value in another form, then the operator is out; a failure on an empty tensor leaves it."""
        garbled = replace(result("index", gems_error=1e30), call="index(float32 2x2)")
        assert Table(ORIGIN, [result("index"), garbled]).verified() == []
        empty = result("cumsum", failure="raised ZeroDivisionError", size=0)
        table = Table(ORIGIN, [result("cumsum"), empty])
        assert table.verified() == ["cumsum"]
        assert table.wrong() == ["cumsum"]

    @pytest.mark.parametrize(
        "bad",
        [
            {"gems_error": 2.1},
            {"gems_error": math.nan},
            {"ratio": math.nan},
            {"failure": "raised X"},
            {"differs": "shape"},
        ],
    )
    def test_what_is_wrong_or_unknown_excludes(self, bad: dict[str, object]) -> None:
        """Given an error, no number, an exception or another form, when judged, then the operator is excluded."""
        assert Table(ORIGIN, [result("cat", **bad)]).verified() == []

    def test_a_call_that_pytorch_itself_cannot_make_says_nothing(self) -> None:
        """Given such a call beside a good one, when judged, then the good one decides; alone nothing is verified."""
        none = result("cat", failure="cannot be made again", own_failure=True)
        assert Table(ORIGIN, [none, result("cat")]).verified() == ["cat"]
        assert Table(ORIGIN, [none]).verified() == []

    def test_the_table_reads_back(self, tmp_path: Path) -> None:
        """Given results with and without numbers, when written and read, then they judge the same."""
        rows = sort_results(
            [result("cat", ratio=0.5), result("mm", failure="raised, a comma"), result("add", ratio=1.5)]
        )
        Table(ORIGIN, rows).write(tmp_path / "sweep.csv")
        read = Table.read(tmp_path / "sweep.csv")
        assert read.origin == ORIGIN
        assert [row.verdict() for row in read.results] == [row.verdict() for row in rows]
        assert read.verified() == ["cat"]
        assert read.call_share() == (2, 6)

    @pytest.mark.parametrize(
        ("column", "text"),
        [("torch_us", "fast"), ("calls", "2²"), ("calls", "9" * 5000), ("phases", "decode_1"), ("phases", "a:1e3")],
        ids=reprlib.repr,
    )
    def test_a_number_that_is_none_names_the_file(self, tmp_path: Path, column: str, text: str) -> None:
        """Given a table with something else in the place of a number, when read, then the error names the file."""
        path = tmp_path / "sweep.csv"
        Table(ORIGIN, [result("cat")]).write(path)
        origin, *lines = path.read_text().splitlines(keepends=True)
        (row,) = csv.DictReader(lines)
        with path.open("w", newline="") as file:
            file.write(origin)
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerow({**row, column: text})
        with pytest.raises(TableError, match=f"{re.escape(str(path))} is no table of a sweep"):
            Table.read(path)

    @pytest.mark.parametrize("content", ["", "# a=1\n", "some text\nmore\n", "# a=1\noperator,call\ncat,x\n"])
    @pytest.mark.parametrize("options", [["--write-list", "new.yaml"], ["--out", "new"]])
    def test_another_file_is_one_line(self, tmp_path: Path, content: str, options: list[str]) -> None:
        """Given a file that is no table, when the command takes it as one, then one line says so, and exit code 1."""
        path, (option, name) = tmp_path / "sweep.csv", options
        path.write_text(content)
        arguments = ["aten-sweep", "--table", str(path), option, str(tmp_path / name)]
        done = CliRunner().invoke(commands, arguments)
        assert done.exit_code == 1
        assert f"{path} is no table of a sweep" in done.output


class TestMerging:
    """Several recordings, and several tables."""

    def test_recordings_keep_their_phases_apart(self) -> None:
        """Given a call in two recordings, when merged, then it is one case, the host's phase by another name."""
        own, host = (
            CaseFile({"device": device}, [Case("relu", [tensor_of(4, low)], {}, {"decode_1": count})])
            for device, low, count in (("NVIDIA H200", 0, 2), ("host", -1, 3))
        )
        merged = merge_cases([own, host])
        (case,) = merged.cases
        assert case.phases == {"decode_1": 2, "empty_decode_1": 3}
        assert case.args[0]["tensor"]["low"] == -1
        assert merged.origin == {"device": "NVIDIA H200 and host"}

    def test_the_slower_measurement_of_a_call_counts(self) -> None:
        """Given two tables, when merged, then an operator must be good in both, and shares are of the own recording."""
        own = Table(ORIGIN | {"recorded_on": "NVIDIA H200"}, [result("cat", ratio=0.9)])
        host = Table(
            ORIGIN | {"recorded_on": "host"},
            [result("cat", phases="decode_1:5", ratio=1.5), result("relu", phases="decode_1:7")],
        )
        for tables in ([own, host], [host, own]):
            merged = Table.merged(tables)
            assert merged.verified() == ["relu"]
            cat = next(row for row in merged.results if row.function == "cat")
            assert (cat.ratio, cat.calls, cat.phases) == (1.5, 7, "decode_1:2 empty_decode_1:5")
            assert merged.call_share() == (0, 2)

    def test_a_probe_is_judged_by_its_values_alone(self) -> None:
        """Given probes, when one is wrong, then its operator is excluded; one that is right is no measurement."""
        untimed = {"how": "not timed", "ratio": math.nan, "phases": "probe:1"}
        probed = Table(ORIGIN, [result("cat", **untimed), result("arange", gems_error=50.0, **untimed)])
        timed = Table(ORIGIN, [result("cat", phases="decode_1:1"), result("arange", phases="decode_1:1")])
        # The same call, recorded and probed, has a time.
        assert Table.merged([probed, timed]).verified() == Table.merged([timed, probed]).verified()
        other = Table(ORIGIN, [replace(row, call=row.call.replace("4", "6")) for row in probed.results])
        assert other.verified() == []
        assert Table.merged([timed, other]).verified() == ["cat"]

    def test_the_probes_of_the_package_are_those_of_the_snippets(self) -> None:
        """Given the stored probes, when the snippets run again, then they make the same calls."""
        assert [case.key for case in read_cases(PROBES).cases] == [case.key for case in probes.record().cases]
        assert {case.operator.partition(".")[0] for case in read_cases(PROBES).cases} == set(probes.SNIPPETS)

    def test_what_was_not_reached_is_not_wrong(self) -> None:
        """Given a case that the time limit left out, then it is excluded, and not called wrong."""
        table = Table(ORIGIN, [result("mm", failure=NOT_REACHED)])
        assert table.wrong() == []
        assert table.verified() == []


class TestWriteList:
    """--write-list."""

    def test_the_list_replaces_an_older_one_and_leaves_the_rest(self, tmp_path: Path) -> None:
        """Given a YAML with comments and an old list, when written twice, then only the list and its comment change."""
        path = tmp_path / "nvidia.yaml"
        path.write_text("# Ours.\ncomm:\n  backend: nccl\n")
        write_list(path, Table(ORIGIN, [result("cat"), result("true_divide")]), "nvidia_sweep.csv")
        names = write_list(
            path, Table(ORIGIN, [result(f"operator_{place}") for place in range(40)]), "nvidia_sweep.csv"
        )
        text = path.read_text()
        assert text.startswith("# Ours.\ncomm:\n  backend: nccl\n# What profile verified replaces")
        assert text.count("flagos_verified") == 1
        assert "5.0.2 on NVIDIA H200" in " ".join(text.split())
        problems: list[object] = []
        entries = {entry.field.name: entry for entry in read_yaml(path, "nvidia.yaml", "x", problems)}  # type: ignore[arg-type]
        assert not problems
        assert entries["aten.verified"].field.type.from_node(entries["aten.verified"].node) == tuple(names)

    def test_wrong_operators_are_listed_until_none_is_wrong(self, tmp_path: Path) -> None:
        """Given a failed operator and a garbled one, then both are the list of wrong ones; a good table removes it."""
        path = tmp_path / "nvidia.yaml"
        path.write_text("comm:\n  backend: nccl\n")
        rows = [
            result("cat"),
            result("mul", gems_error=1e30),
            result("cumsum", failure="raised ZeroDivisionError"),
            result("pow", gems_error=3.0),
            result("sort", failure="PyTorch cannot either", own_failure=True),
        ]
        table = Table(ORIGIN, rows)
        assert table.wrong() == ["cumsum", "mul"]
        write_list(path, table, "nvidia_sweep.csv")
        problems: list[object] = []
        entries = {entry.field.name: entry for entry in read_yaml(path, "nvidia.yaml", "x", problems)}  # type: ignore[arg-type]
        assert entries["aten.wrong"].field.type.from_node(entries["aten.wrong"].node) == ("cumsum", "mul")
        write_list(path, Table(ORIGIN, [result("cat")]), "nvidia_sweep.csv")
        assert "flagos_wrong" not in path.read_text()
        assert "flagos_verified" in path.read_text()

    @pytest.mark.parametrize(
        ("before", "kept"),
        [
            ("a: 1\nflagos_verified:\n- x\n- y\n# Next.\nb: 2\n", "# Next.\nb: 2\n"),
            ("# Mine.\nflagos_verified: [\n  x,\n  y\n]\nb: 2\n", "# Mine.\n#"),
            ("flagos_verified: [x,\n\n  y]  # Mine.\nb: 2\n", "]  # Mine.\nb: 2\n"),
            ("b: 2\nflagos_verified: [x]", "b: 2\n#"),
            ("b: 2", "b: 2\n#"),
            ("# Mine.\r\nflagos_verified: [x]\r\nb: 2\r\n", "]\r\nb: 2\r\n"),
            ("flagos_verified:\nb: 2\n", "]\nb: 2\n"),
            ("flagos_verified: |\n  x\n  y\n\n# Mine.\nb: 2\n", "]\n\n# Mine.\nb: 2\n"),
            ('"flagos_verified": [x]\nb: 2\n', "]\nb: 2\n"),
            ("flagos_wrong: [x]  # Mine.\nb: 2\n", "# Mine.\nb: 2\n"),
            ("", ""),
        ],
    )
    def test_any_form_of_an_older_list_is_replaced(self, tmp_path: Path, before: str, kept: str) -> None:
        """Given a list in blocks, lines or none, when written twice, then YAML reads the new list and all else as it
        was, the user's comments and line endings stay, and the second time changes nothing.
        """
        path = tmp_path / "nvidia.yaml"
        path.write_bytes(before.encode())
        table = Table(ORIGIN, [result("cat"), result("silu")])
        write_list(path, table, "nvidia_sweep.csv")
        once = path.read_bytes()
        assert kept in once.decode()
        rest = {key: value for key, value in (yaml.safe_load(before) or {}).items() if not key.startswith("flagos")}
        assert yaml.safe_load(once) == rest | {"flagos_verified": ["cat", "silu"]}
        assert once.count(b"\r\n") == (once.count(b"\n") if "\r\n" in before else 0)
        write_list(path, table, "nvidia_sweep.csv")
        assert path.read_bytes() == once
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize(
        "before",
        [
            "{flagos_verified: [x]}\n", "flagos_verified: [x]\nflagos_verified: [y]\n", "- x\n", "x\n", "a: [\n",
            "b: &x [y]\nflagos_verified: *x\n", "flagos_verified: &x [y]\nb: *x\n", "  a: 1\n  flagos_verified: [x]\n",
            "b: 2\n...\n", "? flagos_verified\n: [x]\n",
        ],
    )  # fmt: skip
    def test_what_cannot_be_changed_line_by_line_is_refused(self, tmp_path: Path, before: str) -> None:
        """Given YAML in which the list has no lines of its own, when written, then it is refused and left as it is."""
        path = tmp_path / "nvidia.yaml"
        path.write_text(before)
        with pytest.raises(ListError, match=str(path)):
            write_list(path, Table(ORIGIN, [result("cat")]), "nvidia_sweep.csv")
        assert path.read_text() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_the_packages_own_file_comes_out_as_it_is(self, tmp_path: Path) -> None:
        """Given nvidia.yaml and its table, when the lists are written, then no byte changes."""
        for name, table_file in STORED_TABLES.items():
            path = tmp_path / name
            path.write_bytes((CONFIG_DIR / name).read_bytes())
            write_list(path, Table.read(table_file), table_file.name)
            assert path.read_bytes() == (CONFIG_DIR / name).read_bytes()

    def test_a_table_without_good_operators_is_refused(self, tmp_path: Path) -> None:
        """Given a table in which nothing is good, when the list is asked for, then nothing is written."""
        path = tmp_path / "nvidia.yaml"
        path.write_text("comm:\n")
        with pytest.raises(ListError, match="nothing to write"):
            write_list(path, Table(ORIGIN, [result("mm", ratio=2.0)]), "sweep.csv")
        assert path.read_text() == "comm:\n"


# A worker that measures nothing: it obeys the names of the operators.
_WORKER = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
from sglang_fl.aten.sweep.cases import Case
from sglang_fl.aten.sweep.results import Result
with open(sys.argv[2], "a", buffering=1) as lines:
    def say(line): lines.write(json.dumps(line) + "\\n")
    say({"ready": True, "card": "none"})
    for job in json.loads(Path(sys.argv[1]).read_text()):
        case = Case(**job["case"])
        say({"begin": job["place"]})
        if case.operator == "dies": os._exit(9)
        if case.operator == "hangs": time.sleep(60)
        result = Result(case.operator, case.operator, case.describe(), "", 1, ratio=1.0)
        say({"place": job["place"], "result": asdict(result)})
        if case.operator == "loses_the_device": sys.exit(3)
"""


class TestRun:
    """The process that hands out the cases."""

    @staticmethod
    def sweep(tmp_path: Path, names: str, **limits: float) -> tuple[dict[str, str], list[str]]:
        """Failure by operator of a sweep with the worker above, and what was said."""
        worker = tmp_path / "worker.py"
        worker.write_text(_WORKER)
        jobs = [Job(Case(name, [place], {}, {"decode_1": 1}), name) for place, name in enumerate(names.split())]
        said: list[str] = []
        command = (sys.executable, str(worker))
        partial = Partial(tmp_path / "partial.jsonl", ORIGIN, said.append)
        results, ready = run(jobs, partial, Limits(**limits), said.append, command)
        assert [result.function for result in results] == [job.function for job in jobs]
        assert ready == {"ready": True, "card": "none"} or not ready
        return {result.function: result.failure for result in results}, said

    def test_a_worker_that_dies_costs_one_case(self, tmp_path: Path) -> None:
        """Given cases that end and lose the process, when swept, then the others are measured, after a restart."""
        failures, _ = self.sweep(tmp_path, "a dies b loses_the_device c")
        assert failures == {
            "a": "", "dies": "the process ended with code 9", "b": "", "loses_the_device": "", "c": "",
        }  # fmt: skip

    def test_a_case_that_hangs_is_ended(self, tmp_path: Path) -> None:
        """Given a case over its limit, when swept, then it is reported and the rest goes on."""
        failures, said = self.sweep(tmp_path, "a hangs b", case_s=2.0)
        assert failures == {"a": "", "hangs": "took longer than 2 s", "b": ""}
        assert any("hangs" in line for line in said)

    def test_the_limit_of_the_whole_leaves_a_reason_and_a_later_run_goes_on(self, tmp_path: Path) -> None:
        """Given too little time, when swept again without the obstacle, then only what is missing is measured."""
        failures, _ = self.sweep(tmp_path, "a hangs b", total_s=20.0)
        assert failures == {"a": "", "hangs": NOT_REACHED, "b": NOT_REACHED}
        failures, said = self.sweep(tmp_path, "a dies b")
        assert "1 of 3 cases" in said[0]
        assert failures["b"] == ""

    def test_a_worker_that_cannot_start_ends_the_sweep(self, tmp_path: Path) -> None:
        """Given a command that fails at once, when swept, then the error shows what it printed."""
        jobs = [Job(Case("a", [], {}), "a")]
        command = (sys.executable, "-c", "raise SystemExit('no driver')")
        with pytest.raises(SweepError, match="code 1: no driver"):
            run(jobs, Partial(tmp_path / "partial.jsonl", ORIGIN, print), Limits(), print, command)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_a_signal_ends_the_worker_too(self, tmp_path: Path, number: int) -> None:
        """Given a sweep whose worker hangs, when it gets a signal that ends it, then its worker is gone before it."""
        sweep, worker = self.hanging(tmp_path, "sh", "-c", "exec sleep 600")
        sweep.send_signal(number)
        assert sweep.wait(timeout=30) != 0
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)

    @pytest.mark.parametrize("is_begun", [False, True])
    def test_the_worker_ends_with_a_sweep_that_is_killed(self, tmp_path: Path, is_begun: bool) -> None:
        """Given a worker that knows its parent, or begins to, when that is killed, then the worker ends as well."""
        begun = tmp_path / "begun"
        waits = (
            "import sys, time\nfrom pathlib import Path\nfrom sglang_fl.aten.sweep.worker import end_with\n"
            f"end_with(int(sys.argv[3]))\nPath({str(begun)!r}).touch()\ntime.sleep(600)"
        )
        sweep, worker = self.hanging(tmp_path, sys.executable, "-c", waits)
        while is_begun and not begun.exists():
            assert sweep.poll() is None
            time.sleep(0.05)
        sweep.kill()
        sweep.wait(timeout=30)
        # Without an init that waits for it, it stays as a zombie.
        tries = 600
        while tries and psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
            tries -= 1
        assert tries, "the worker is still there"
        assert begun.exists() == is_begun

    @staticmethod
    def hanging(tmp_path: Path, *command: str) -> tuple[subprocess.Popen[bytes], int]:
        """A process that sweeps with ``command``, which hangs, for its worker, and the worker's id."""
        script = (
            "import sys\nfrom pathlib import Path\nfrom sglang_fl.aten.sweep.cases import Case\n"
            "from sglang_fl.aten.sweep.partial import Partial\nfrom sglang_fl.aten.sweep.run import Job, Limits, run\n"
            "run([Job(Case('a', [], {}), 'a')], Partial(Path(sys.argv[1]), {}, print), Limits(), print, sys.argv[2:])"
        )
        sweep = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "partial.jsonl"), *command])
        try:
            while not (workers := psutil.Process(sweep.pid).children()):
                assert sweep.poll() is None
                time.sleep(0.05)
        except BaseException:
            sweep.kill()
            raise
        return sweep, workers[0].pid


class TestOperators:
    """--operators."""

    GEMS = Gems(
        ModuleType("flag_gems"), "5.0.2",
        tuple(Entry(key, name, print) for key, name in (
            ("rsqrt", "rsqrt"), ("cumsum", "cumsum"), ("div.Tensor", "true_divide"), ("div.Tensor_mode", "div_mode"),
            ("arange.start", "arange_start"), ("arange.start_step", "arange_start"), ("argmax", "argmax"),
        )),
        "nvidia", "cuda", "CUDA",
    )  # fmt: skip

    @pytest.mark.parametrize(
        ("names", "operators"),
        [
            ("rsqrt", {"rsqrt"}),
            ("true_divide", {"div.Tensor"}),
            ("div.Tensor_mode", {"div.Tensor_mode"}),
            ("div", {"div.Tensor", "div.Tensor_mode"}),
            ("arange_start", {"arange.start", "arange.start_step"}),
            ("arange.start", {"arange.start"}),
            ("argmax.default", {"argmax"}),
        ],
    )
    def test_names_are_those_of_the_lists(self, names: str, operators: set[str]) -> None:
        """Given a name in any spelling, then the ATen operators that it means are chosen."""
        assert NameResolver(self.GEMS).operators([names]) == operators
        cases = [Case(entry.key, [tensor_of(4, 0)], {}, {"decode_1": 1}) for entry in self.GEMS.entries]
        assert {job.case.operator for job in choose(cases, self.GEMS, operators)} == operators

    def test_a_typo_is_an_error_before_anything_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Given a typo beside a name, when swept, then the error suggests the right one, and nothing was begun."""
        monkeypatch.setattr(gems, "load", lambda: self.GEMS)
        out = tmp_path / "out"
        options = ["--operators", "rsqrt,cumsumm", "--out", str(out), "--shapes", str(tmp_path / "no such file")]
        done = CliRunner().invoke(commands, ["aten-sweep", *options])
        assert done.exit_code == 2
        assert "no operator 'cumsumm'. Did you mean 'cumsum'?" in " ".join(done.output.split())
        assert not out.exists()

    def test_a_name_without_a_recorded_call_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Given a name that no recording has, when swept, then that is said before the sweep."""
        monkeypatch.setattr(gems, "load", lambda: self.GEMS)
        # In place of the sweep itself, which needs a GPU.
        monkeypatch.setattr(origin, "describe", lambda *_: raise_error(SweepError("the sweep begins")))
        options = ["--operators", "aten::argmax,rsqrt", "--out", str(tmp_path), "--shapes", str(SHAPES)]
        done = CliRunner().invoke(commands, ["aten-sweep", *options])
        assert "rsqrt is not measured: no recorded call of it" in done.output
        assert "argmax is not measured" not in done.output
        assert "the sweep begins" in done.output


class TestPartial:
    """What a sweep that was not ended has left."""

    LINE = '{"key": "a", "result": {"operator": "a", "function": "a", "call": "a()", "phases": "", "calls": 1}}\n'
    HEAD = json.dumps({"origin": ORIGIN}) + "\n"

    def test_what_was_added_is_read_again(self, tmp_path: Path) -> None:
        """Given an origin and a result, when read again with that origin, then the result is there."""
        path = tmp_path / "partial.jsonl"
        Partial(path, ORIGIN, print).add("a", result("a"))
        assert path.read_text().startswith(self.HEAD)
        assert Partial(path, ORIGIN, print).results.keys() == {"a"}

    @pytest.mark.parametrize(
        ("text", "known"),
        [(HEAD + LINE + LINE[:-9], ["a"]), (HEAD + LINE[:20], []), (HEAD[:9], []), (HEAD[:-1], []), ("", [])],
    )
    def test_a_torn_last_line_is_dropped(self, tmp_path: Path, text: str, known: list[str]) -> None:
        """Given a last line that was not written whole, when read, then the rest counts, and what follows is whole."""
        path = tmp_path / "partial.jsonl"
        path.write_text(text)
        said: list[str] = []
        partial = Partial(path, ORIGIN, said.append)
        assert list(partial.results) == known
        assert ["torn" in line for line in said] == ([True] if text else [])
        partial.add("b", result("b"))
        assert list(Partial(path, ORIGIN, print).results) == [*known, "b"]

    @pytest.mark.parametrize("line", ["{\n", "3\n", "{}\n", LINE.replace("calls", "cells"), "\n"])
    def test_a_bad_line_in_the_middle_is_an_error_that_names_it(self, tmp_path: Path, line: str) -> None:
        """Given a line that is no result, when read, then the error has file and line, and what to do."""
        path = tmp_path / "partial.jsonl"
        path.write_text(self.HEAD + self.LINE + line + self.LINE)
        with pytest.raises(SweepError, match=r"partial.jsonl:3 is no result of a sweep .*Remove the line"):
            Partial(path, ORIGIN, print)

    @pytest.mark.parametrize("name", ORIGIN)
    def test_results_of_another_origin_are_refused(self, tmp_path: Path, name: str) -> None:
        """Given results of another FlagGems, card or torch, when read, then the error says which, and what to do."""
        path = tmp_path / "partial.jsonl"
        Partial(path, ORIGIN | {name: "another"}, print).add("a", result("a"))
        before = path.read_text()
        with pytest.raises(SweepError, match=rf"{name} another, here {ORIGIN[name]}.*Give another --out, or remove"):
            Partial(path, ORIGIN, print)
        assert path.read_text() == before

    def test_results_of_another_recording_count_with_its_calls(self, tmp_path: Path) -> None:
        """Given a result of a call, when another recording of it is swept, then its own phases and calls stand."""
        path = tmp_path / "partial.jsonl"
        job = Job(Case("a", [], {}, {"decode_1": 3}), "a")
        Partial(path, ORIGIN | {"sglang": "0.5.10"}, print).add(job.case.key, result("a", phases="decode_8:2"))
        partial = Partial(path, ORIGIN | {"sglang": "0.5.11"}, print)
        ((found,), _) = run([job], partial, Limits(), print, ("false",))
        assert (found.phases, found.calls, found.torch_us) == ("decode_1:3", 3, 100.0)

    @pytest.mark.parametrize("line", ["# card=NVIDIA H200; torch=2.11.0\n", "# flag_gems=5.0.2; card=NVIDIA H200\n"])
    def test_a_table_without_its_origin_is_none(self, tmp_path: Path, line: str) -> None:
        """Given a table whose first line lacks a version, when a list is to be written, then the error says which."""
        path = tmp_path / "sweep.csv"
        Table(ORIGIN, [result("cat")]).write(path)
        path.write_text(line + path.read_text().partition("\n")[2])
        target = tmp_path / "nvidia.yaml"
        target.touch()
        done = CliRunner().invoke(commands, ["aten-sweep", "--write-list", str(target), "--table", str(path)])
        assert done.exit_code == 1
        assert "its first line does not say" in " ".join(done.output.split())

    def test_files_that_are_not_there_are_named(self, tmp_path: Path) -> None:
        """Given no YAML, when a list is to be written, then the error names it and says what is wrong."""
        path = tmp_path / "sweep.csv"
        Table(ORIGIN, [result("cat")]).write(path)
        missing = tmp_path / "missing.yaml"
        done = CliRunner().invoke(commands, ["aten-sweep", "--write-list", str(missing), "--table", str(path)])
        assert f"{missing}: No such file or directory; both files must be there" in " ".join(done.output.split())

    def test_one_table_is_not_merged_with_itself(self, tmp_path: Path) -> None:
        """Given the same file twice, when merged, then it is refused: its calls would count twice."""
        path = tmp_path / "sweep.csv"
        Table(ORIGIN, [result("cat")]).write(path)
        done = CliRunner().invoke(commands, ["aten-sweep", "--out", str(tmp_path), *["--table", str(path)] * 2])
        assert done.exit_code == 2
        assert "the same file twice" in done.output

    def test_results_without_an_origin_are_refused(self, tmp_path: Path) -> None:
        """Given a file that begins with a result, when read, then the error says what it lacks."""
        path = tmp_path / "partial.jsonl"
        path.write_text(self.LINE)
        with pytest.raises(SweepError, match="does not say in its first line what it was measured on"):
            Partial(path, ORIGIN, print)


def tensor_data(
    shape: list[int], stride: list[int], dtype: str, low: float | None = None, high: float | None = None
) -> dict[str, object]:
    """A tensor of the accelerator in a case's notation."""
    data: dict[str, object] = {"shape": shape, "stride": stride, "dtype": dtype, "device": ACCELERATOR}
    return {"tensor": data if low is None else data | {"low": low, "high": high}}


def sum_of_sizes(case: Case) -> int:
    """Elements of all tensors in the arguments."""
    return sum(math.prod(item["tensor"]["shape"]) for item in case.args if isinstance(item, dict) and "tensor" in item)


def tensor_of(size: int, low: int) -> dict[str, object]:
    """A float tensor in a case's notation."""
    return {
        "tensor": {"shape": [size], "stride": [1], "dtype": "float32", "device": "accelerator", "low": low, "high": 1}
    }


def raise_error(error: Exception) -> None:
    """Raise ``error``, as an expression."""
    raise error


def result(function: str, **changes: object) -> Result:
    """A good result, with changes."""
    values: dict[str, object] = {
        "reference": "float64", "torch_error": 1.0, "gems_error": 1.0, "allowed_error": 2.0, "ratio": 1.0, "calls": 2,
        "phases": "decode_1:2", "torch_us": 100.0,
    }  # fmt: skip
    call = f"{function}(float32 {changes.pop('size', 4)})"
    values |= changes
    values.setdefault("gems_us", 100.0 * values["ratio"])  # type: ignore[operator]  # a number
    return Result(function, function, call, **values)  # type: ignore[arg-type]
