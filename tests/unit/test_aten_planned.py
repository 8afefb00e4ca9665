"""Profile verified without a GPU: which calls are measured ones, and launches that are noted and made again.

Kernels are real ``CompiledKernel`` objects of the installed Triton whose launcher is a stand-in: it adds on the host,
at the addresses that it is given. Functions call them as FlagGems' do.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.compiler.compiler import CompiledKernel

from sglang_fl.aten import planned, records
from sglang_fl.aten.gems import Entry
from sglang_fl.aten.launches import NoPlanError, is_supported, note
from sglang_fl.aten.planned import EagerOperator, GraphOperator, PlannedOperator, ReplacedOperator
from sglang_fl.aten.sweep.forms import NOT_SLOWER, Forms, Measured, form_of_call, form_of_text

ON_HOST = -1
SLOWER = float("-inf")


class HostDevice:
    """The host as a device; ``capturing`` pretends a capture."""

    capturing = False

    def index(self) -> int:
        """As ``Tensor.get_device`` says of the host."""
        return ON_HOST

    def stream(self, index: int) -> int:
        """A number that the launcher is to see."""
        return 77

    def is_capturing(self) -> bool:
        """What the test wants."""
        return self.capturing


def measured(call: str, *, right: bool = True, exact: bool = True, gain_us: float | None = 9.0) -> Measured:
    """One call of a table."""
    return Measured(call, right, exact, gain_us)


class TestForms:
    """What a table says of calls that it does not hold."""

    def test_a_live_call_has_the_form_of_its_row(self) -> None:
        """Given calls as the table writes them, when the same are made, then the forms are equal."""
        ints = torch.zeros(3, dtype=torch.int32)
        pairs = [
            ("add_.Tensor(int32 8, 1)", form_of_call("add_.Tensor", (ints, 5), {})),
            ("cumsum(int32 32, 0)", form_of_call("cumsum", (ints, 0), {})),
            ("cat([float32 2x3, float32 4x3], -1)", form_of_call("cat", ([torch.zeros(1, 2)] * 2, -1), {})),
            (
                "mul.Tensor(float32 4x2 strides [1, 4], float32 scalar)",
                form_of_call("mul.Tensor", (torch.zeros(3, 5).t(), torch.tensor(1.0)), {}),
            ),
            ("_to_copy(float32 9, dtype=int32)", form_of_call("_to_copy", (torch.zeros(2),), {"dtype": torch.int32})),
        ]
        for text, live in pairs:
            assert live is not None
            assert form_of_text(text).text == live.text

    @pytest.mark.parametrize(
        ("operator", "args"),
        [
            ("cumsum", (torch.zeros(3, dtype=torch.int32), 1)),
            ("cumsum", (torch.zeros(3, dtype=torch.int64), 0)),
            ("cumsum", (torch.zeros(3, 2, dtype=torch.int32), 0)),
            ("cumsum", (torch.zeros(6, dtype=torch.int32)[::2], 0)),
        ],
    )
    def test_another_dtype_layout_or_argument_is_another_form(self, operator: str, args: Any) -> None:
        """Given a row, when a call differs in more than sizes, then it is not of that form."""
        live = form_of_call(operator, args, {})
        assert live is not None
        assert live.text != form_of_text("cumsum(int32 32, 0)").text

    def test_the_nearest_measured_sizes_decide(self) -> None:
        """Given sizes 10 (good), 100 (slower) and 1000 (good), then what lies beside 100 is not taken."""
        forms = Forms(
            [measured(f"cumsum(int32 {size}, 0)", gain_us=SLOWER if size == 100 else 9.0) for size in (10, 100, 1000)]
        )
        taken = {size: forms.take(form_of_text(f"cumsum(int32 {size}, 0)")) for size in (1, 10, 50, 100, 500, 1000)}
        assert taken == {1: True, 10: True, 50: False, 100: False, 500: False, 1000: True}
        assert forms.take(form_of_text("cumsum(int32 16000, 0)"))
        assert not forms.take(form_of_text("cumsum(int32 16001, 0)"))

    def test_what_was_once_wrong_is_never_taken_and_what_has_no_time_neither(self) -> None:
        """Given a wrong probe beside good sizes, or probes alone, or an empty call, then none is taken."""
        call = form_of_text("cumsum(int32 10, 0)")
        assert not Forms([measured("cumsum(int32 10, 0)"), measured("cumsum(int32 4, 0)", right=False)]).take(call)
        assert not Forms([measured("cumsum(int32 10, 0)", gain_us=None)]).take(call)
        forms = Forms([measured("cumsum(int32 10, 0)"), measured("cumsum(int32 0, 0)", right=False)])
        assert forms.take(call)
        assert not forms.take(form_of_text("cumsum(int32 0, 0)"))
        assert not Forms([measured("arange(9)")]).take(form_of_text("arange(9)"))

    def test_only_exact_forms_where_ranks_must_agree(self) -> None:
        """Given a form with other roundings, then it is taken, but not where values must be PyTorch's."""
        forms = Forms([measured("cumsum(float32 9, 0)", exact=False)])
        assert forms.take(form_of_text("cumsum(float32 9, 0)"))
        assert not forms.take(form_of_text("cumsum(float32 9, 0)"), exact_only=True)

    def test_what_must_save_more_is_taken_where_both_neighbours_save_it(self) -> None:
        """Given gains of 1 us at 10 elements and 9 us at 100 and 1000, when 5 us are asked for, then from 100 on."""
        rows = [measured("cumsum(int32 10, 0)", gain_us=1.0), measured("ge.Tensor(int32 7, int32 1)", gain_us=9.0)]
        forms = Forms([*rows, *(measured(f"cumsum(int32 {size}, 0)") for size in (100, 1000))])
        taken = {size: forms.take(form_of_text(f"cumsum(int32 {size}, 0)"), 5.0) for size in (10, 50, 100, 500)}
        assert taken == {10: False, 50: False, 100: True, 500: True}
        assert forms.least_sizes(5.0) == {"cumsum": 100, "ge.Tensor": 7}
        assert forms.least_sizes() == {"cumsum": 10, "ge.Tensor": 7}


class Kernel:
    """out[i] = left[i] + right[i] * factor over int64, as a compiled kernel of Triton with a stand-in launcher."""

    def __init__(self, fault: int = 0) -> None:
        self.compiled: Any = object.__new__(CompiledKernel)
        self.compiled._run = self.launch
        self.launches: list[tuple[Any, ...]] = []
        self.fault = fault

    def launch(self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
        """What Triton's launcher does: addresses or tensors, then work."""
        _, _, _, out, left, right, factor, count = rest
        self.launches.append((x, y, z, stream, function, packed))
        out, left, right = (a if isinstance(a, int) else a.data_ptr() for a in (out, left, right))
        cells = [ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)) for address in (out, left, right)]
        fault = self.fault * (len(self.launches) - 1)
        for place in range(count):
            cells[0][place] = cells[1][place] + cells[2][place] * factor + fault

    def __call__(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, factor: int) -> None:
        """Launch as generated code does."""
        self.compiled.run(3, 2, 1, 5, "function", "packed", None, None, None, out, left, right, factor, out.numel())


@pytest.fixture
def kernel() -> Kernel:
    """A kernel that adds right."""
    return Kernel()


def add(kernel: Kernel) -> Callable[..., torch.Tensor]:
    """A function as FlagGems has them: an output of its own, and a temporary."""

    def function(left: torch.Tensor, right: torch.Tensor, *, alpha: int = 1) -> torch.Tensor:
        doubled = torch.empty_like(left)
        out = torch.empty(left.numel(), dtype=left.dtype)
        kernel(doubled, left, left, 0)
        kernel(out, doubled, right, alpha)
        return out.view(left.shape)

    return function


def tensor(*values: int) -> torch.Tensor:
    """int64."""
    return torch.tensor(values, dtype=torch.int64)


TENSOR_OF_BEFORE: torch.Tensor = tensor(3, 4)


class TestPlan:
    """Noting one call and repeating it."""

    def test_the_installed_triton_is_supported(self) -> None:
        """Given Triton 3.6, then launches can be noted."""
        assert is_supported() == ""

    def test_a_plan_follows_the_tensors_of_each_call(self, kernel: Kernel) -> None:
        """Given a call noted with a temporary and a view as result, when repeated with others, then it is theirs."""
        plan = note(add(kernel), (tensor(1, 2), tensor(3, 4)), {"alpha": 2}, (), HostDevice())
        assert plan([tensor(10, 20), tensor(1, 1)]).tolist() == [12, 22]
        one = tensor(5, 6)
        assert plan([one, one]).tolist() == [15, 18]
        # The grid, the function and what is packed with it as noted; the stream is the one of the moment.
        assert kernel.launches[-1] == (3, 2, 1, 77, "function", "packed")

    def test_the_result_has_the_views_shape(self, kernel: Kernel) -> None:
        """Given a function that returns its output seen otherwise, when repeated, then shape and strides are those."""
        plan = note(add(kernel), (tensor(1, 2).view(2, 1), tensor(3, 4).view(2, 1)), {}, (), HostDevice())
        result = plan([tensor(1, 2).view(2, 1), tensor(3, 4).view(2, 1)])
        assert (result.tolist(), result.stride()) == ([[4], [6]], (1, 1))

    def test_a_view_of_an_argument_begins_where_the_argument_does(self, kernel: Kernel) -> None:
        """Given a function that writes to a part of a memory and returns it seen otherwise, when repeated with another
        part, then the result is of that one."""

        def add_in_place(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            kernel(left, left, right, 1)
            return left.view(1, 2)

        whole = torch.arange(8)
        plan = note(add_in_place, (whole[0:2], tensor(1, 1)), {}, (0,), HostDevice())
        assert plan([whole[4:6], tensor(1, 1)]).tolist() == [[5, 6]]

    def test_what_is_changed_is_not_touched_by_noting(self, kernel: Kernel) -> None:
        """Given an operator in place, when noted, then the argument is as it was; when repeated, it is changed."""

        def add_in_place(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            kernel(left, left, right, 1)
            return left

        given = tensor(1, 2)
        plan = note(add_in_place, (given, tensor(1, 1)), {}, (0,), HostDevice())
        assert given.tolist() == [1, 2]
        assert plan([given, tensor(5, 5)]) is given
        assert given.tolist() == [6, 7]

    def test_arguments_that_share_memory_are_told_apart(self, kernel: Kernel) -> None:
        """Given one tensor twice and views of one memory, when repeated with others, then each address is its own."""
        one = tensor(1, 2)
        plan = note(add(kernel), (one, one), {}, (), HostDevice())
        assert plan([tensor(1, 2), tensor(30, 40)]).tolist() == [31, 42]
        whole = tensor(1, 2, 3, 4)
        plan = note(add(kernel), (whole[:2], whole[2:]), {}, (), HostDevice())
        assert plan([tensor(1, 2), tensor(30, 40)]).tolist() == [31, 42]

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda kernel: lambda left, right: add(kernel)(left, right) + 1, "calls aten::add"),
            (lambda kernel: lambda left, right: add(kernel)(left, right.abs()), "calls aten::abs"),
            (
                lambda kernel: lambda left, right: add(kernel)(left, right, alpha=int(right[0])),
                "calls aten::_local_scalar_dense",
            ),
            (lambda kernel: lambda left, right: left, "launched no kernel"),
            (lambda kernel: lambda left, right: (add(kernel)(left, right), left), "returns a tuple"),
            (lambda kernel: lambda left, right: add(kernel)(left, TENSOR_OF_BEFORE), "neither an argument nor"),
        ],
    )
    def test_what_cannot_be_repeated_is_refused(self, kernel: Kernel, change: Any, reason: str) -> None:
        """Given a function that does more than allocate and launch, when noted, then it is refused with the reason."""
        with pytest.raises(NoPlanError, match=reason):
            note(change(kernel), (tensor(1, 2), tensor(3, 4)), {}, (), HostDevice())

    def test_another_value_when_repeated_is_refused(self) -> None:
        """Given launches that give something else each time, when noted, then the plan is refused."""
        with pytest.raises(NoPlanError, match="gave other values"):
            note(add(Kernel(fault=1)), (tensor(1, 2), tensor(3, 4)), {}, (), HostDevice())

    def test_triton_is_as_before_after_a_failure(self, kernel: Kernel) -> None:
        """Given a function that raises, when noted, then Triton's class is not left changed."""

        def fails(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

        before = CompiledKernel.run
        with pytest.raises(ValueError, match="no"):
            note(fails, (tensor(1), tensor(2)), {}, (), HostDevice())
        assert CompiledKernel.run is before


FORM = "add.Tensor(int64 2, int64 2)"


@pytest.fixture
def device() -> HostDevice:
    """The host."""
    return HostDevice()


@pytest.fixture
def put() -> Iterator[Callable[..., ReplacedOperator]]:
    """Puts a replaced operator under PyTorch's, on the host; the test's end takes it away."""
    libraries: list[Any] = []

    def register(
        key: str,
        function: Any,
        forms: Forms,
        device: HostDevice,
        kind: type[ReplacedOperator] = PlannedOperator,
        exact_only: bool = False,
        least_gain_us: float = NOT_SLOWER,
        least_size: int = 1,
    ) -> ReplacedOperator:
        own = torch.library.get_kernel(f"aten::{key}", "CPU")
        entry = Entry(key, "of the test", function)
        operator = kind(entry, own, forms, device, exact_only, least_gain_us, least_size)
        libraries.append(torch.library.Library("aten", "IMPL"))  # type: ignore[no-untyped-call]  # torch has no types here
        libraries[-1].impl(key, operator, "CPU", with_keyset=True)
        return operator

    yield register
    for library in libraries:
        library._destroy()


class TestOperator:
    """In the dispatcher of PyTorch."""

    def test_the_second_call_of_a_measured_form_is_noted(self, put: Any, kernel: Kernel, device: HostDevice) -> None:
        """Given a measured form, when called four times, then PyTorch, noting, and the plan; all values are right."""
        operator = put("add.Tensor", add(kernel), Forms([measured(FORM)]), device)
        with torch.inference_mode():
            launches = []
            for number in range(4):
                assert torch.add(tensor(number, 2), tensor(1, 1)).tolist() == [number + 1, 3]
                launches.append(len(kernel.launches))
        # Noting launches the two kernels, and again to compare; then for the call itself.
        assert launches == [0, 6, 8, 10]
        assert operator.taken() == 1

    @pytest.mark.parametrize(
        "call",
        [
            lambda: torch.add(tensor(1, 2).int(), tensor(1, 1).int()).tolist(),
            lambda: torch.add(tensor(1, 2), tensor(1, 1), alpha=1).tolist(),
            lambda: torch.add(tensor(1, 2), 1).tolist(),
            lambda: torch.add(1, tensor(1, 2)).tolist(),
            lambda: torch.add(tensor(1, 2), 0.5).tolist(),
            lambda: torch.add(tensor(1, 2).int(), 2**40).tolist(),
            lambda: torch.add(torch.tensor(2, dtype=torch.int32), 1).dtype,
            lambda: torch.add(tensor(*range(64)), tensor(*range(64))).tolist(),
            lambda: torch.add(tensor(), tensor()).tolist(),
        ],
    )
    def test_every_other_call_is_pytorchs(self, put: Any, kernel: Kernel, device: HostDevice, call: Any) -> None:
        """Given another dtype, a number, a larger size or nothing, when called, then result and dtype are PyTorch's."""
        with torch.inference_mode():
            right = call()
            operator = put("add.Tensor", add(kernel), Forms([measured(FORM)]), device)
            assert [call() for _ in range(4)] == [right] * 4
        assert not kernel.launches or operator.taken() == 1

    def test_a_number_in_place_stays_in_place(self, put: Any, device: HostDevice) -> None:
        """Given add_ with a number, not measured, when called, then the tensor itself is changed, in its dtype."""
        put("add_.Tensor", None, Forms([]), device)
        for dtype, number in ((torch.int32, 2), (torch.float32, 0.5)):
            given = torch.ones(3, dtype=dtype)
            with torch.inference_mode():
                result = given.add_(number)
            assert result is given
            assert (given.dtype, given.tolist()) == (dtype, [1 + number] * 3)

    def test_a_number_is_a_constant_of_its_plan(self, put: Any, kernel: Kernel, device: HostDevice) -> None:
        """Given 1, 1.0, True and 2, when called in turns, then none uses the plan of another."""

        def add_number(left: torch.Tensor, right: int) -> torch.Tensor:
            kernel(left, left, left, int(right))
            return left

        put("add_.Tensor", add_number, Forms([measured("add_.Tensor(int64 1, 1)")]), device)
        with torch.inference_mode():
            for _ in range(3):
                # The stand-in multiplies: 3 + 3 * 1, 3 + 3 * 2; PyTorch adds.
                assert tensor(3).add_(True).tolist() == [4]
                assert tensor(3).add_(1).tolist() in ([4], [6])
                assert tensor(3).add_(2).tolist() in ([5], [9])

    def test_while_a_graph_is_captured_nothing_is_noted(self, put: Any, kernel: Kernel, device: HostDevice) -> None:
        """Given a capture, when an unknown call comes, then it is PyTorch's; a noted one is replayed by its plan."""
        put("add.Tensor", add(kernel), Forms([measured(FORM)]), device)
        with torch.inference_mode():
            device.capturing = True
            for _ in range(3):
                torch.add(tensor(1, 2), tensor(1, 1))
            assert not kernel.launches
            device.capturing = False
            for _ in range(2):
                torch.add(tensor(1, 2), tensor(1, 1))
            device.capturing = True
            assert torch.add(tensor(1, 2), tensor(1, 1)).tolist() == [2, 3]
        assert len(kernel.launches) == 8

    def test_a_function_that_raises_leaves_the_call_to_pytorch(
        self, put: Any, device: HostDevice, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Given a FlagGems that raises, when called again and again, then values are right and one warning says it."""

        def fails(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such kernel")

        put("add.Tensor", fails, Forms([measured(FORM)]), device)
        with torch.inference_mode(), caplog.at_level(logging.WARNING):
            for _ in range(4):
                assert torch.add(tensor(1, 2), tensor(1, 1)).tolist() == [2, 3]
        (said,) = [record.getMessage() for record in caplog.records]
        assert "add.Tensor is PyTorch's own: FlagGems' function raised ValueError: no such kernel" in said

    def test_with_other_ranks_only_exact_forms_count(self, put: Any, kernel: Kernel, device: HostDevice) -> None:
        """Given a form whose roundings differ, when ranks must agree, then it is PyTorch's."""
        put("add.Tensor", add(kernel), Forms([measured(FORM, exact=False)]), device, exact_only=True)
        with torch.inference_mode():
            for _ in range(3):
                torch.add(tensor(1, 2), tensor(1, 1))
        assert not kernel.launches

    def test_what_is_written_while_it_is_read_stays_pytorchs(
        self, put: Any, kernel: Kernel, device: HostDevice
    ) -> None:
        """Given add_ of apart tensors noted, when they overlap, then PyTorch refuses it; one with itself it adds."""

        def add_in_place(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            kernel(left, left, right, 1)
            return left

        put("add_.Tensor", add_in_place, Forms([measured("add_.Tensor(int64 2, int64 2)")]), device)
        whole = tensor(1, 2, 3)
        with torch.inference_mode():
            for _ in range(3):
                assert tensor(1, 2).add_(tensor(1, 1)).tolist() == [2, 3]
            launches = len(kernel.launches)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="single memory location"):
                    whole[1:].add_(whole[:-1])
            same = whole[:2]
            assert same.add_(same).tolist() == [2, 4]
        assert len(kernel.launches) == launches > 0

    def test_for_a_record_the_function_is_called_each_time(
        self, put: Any, device: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Given records, when called three times, then FlagGems' function ran three times, and once to be tried, and
        the calls alone are in the record.
        """
        calls = []
        gems = logging.getLogger(records.GEMS_LOGGER)
        for name, value in (("handlers", []), ("level", gems.level), ("propagate", gems.propagate)):
            monkeypatch.setattr(gems, name, value)
        target = records.start(tmp_path / "x.txt", 0, False, [])

        def function(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            logging.getLogger("flag_gems.ops.add").debug("GEMS ADD")
            return left.clone()

        put("add.Tensor", function, Forms([measured(FORM)]), device, kind=EagerOperator)
        with torch.inference_mode():
            for _ in range(3):
                assert torch.add(tensor(1, 2), tensor(1, 1)).tolist() == [1, 2]
        assert len(calls) == 4
        assert len(target.read_text().splitlines()) == 3

    @pytest.mark.parametrize("kind", [EagerOperator, PlannedOperator, GraphOperator])
    def test_a_function_that_ends_the_process_is_pytorchs(self, put: Any, device: HostDevice, kind: Any) -> None:
        """Given a function that calls sys.exit, when called, then every call is PyTorch's, and the process goes on."""

        def function(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            raise SystemExit(3)

        put("add.Tensor", function, Forms([measured(FORM)]), device, kind=kind)
        with torch.inference_mode():
            for _ in range(3):
                assert torch.add(tensor(1, 2), tensor(1, 1)).tolist() == [2, 3]

    def test_a_graph_has_the_function_itself(self, put: Any, device: HostDevice) -> None:
        """Given a graph's operator, when warmed up and captured, then FlagGems' function is called each time, and once
        to be tried; what the warm-up did not call is PyTorch's in the capture."""
        calls = []

        def function(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return left.clone()

        forms = Forms([measured(FORM), measured("add.Tensor(int64 3, int64 3)")])
        put("add.Tensor", function, forms, device, kind=GraphOperator)
        with torch.inference_mode():
            for device.capturing in (False, False, True):
                assert torch.add(tensor(1, 2), tensor(1, 1)).tolist() == [1, 2]
            assert torch.add(tensor(1, 2, 3), tensor(1, 1, 1)).tolist() == [2, 3, 4]
        assert len(calls) == 4

    def test_a_graphs_function_that_raises_after_it_wrote_has_written_nothing(
        self, put: Any, kernel: Kernel, device: HostDevice
    ) -> None:
        """Given an operator in place that launches and then raises, when called, then PyTorch adds once."""

        def fails(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            kernel(left, left, right, 1)
            raise ValueError("too late")

        put("add_.Tensor", fails, Forms([measured("add_.Tensor(int64 2, int64 2)")]), device, kind=GraphOperator)
        with torch.inference_mode():
            assert tensor(1, 2).add_(tensor(10, 10)).tolist() == [11, 12]
        assert kernel.launches

    def test_a_negated_tensor_is_pytorchs(self, put: Any, device: HostDevice) -> None:
        """Given copy_, which gets a tensor with the negative bit, when called, then the values are the negated ones."""

        def copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it does not know the bit")

        put("copy_", copy, Forms([measured("copy_(int64 2, int64 2)")]), device, kind=GraphOperator)
        with torch.inference_mode():
            for _ in range(3):
                assert tensor(0, 0).copy_(torch._neg_view(tensor(1, 2))).tolist() == [-1, -2]

    @pytest.mark.parametrize(
        ("key", "call"),
        [
            ("copy_", lambda t: torch.ops.aten.copy_.default(t.clone(), 3.0)),
            ("div.Tensor_mode", lambda t: torch.div(t, 2, rounding_mode="floor")),
            ("remainder.Tensor", lambda t: 7 % t),
            ("bitwise_left_shift.Tensor", lambda t: 5 << t),
            ("xlogy.Tensor", lambda t: torch.xlogy(2, t)),
            ("remainder.Tensor", lambda t: 7 % t[0]),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_a_number_in_any_operator_is_pytorchs(
        self, put: Any, device: HostDevice, key: str, call: Any, dtype: torch.dtype
    ) -> None:
        """Given operators that nothing was measured of, when a number is a tensor of theirs, then values and dtype are
        PyTorch's."""
        given = torch.arange(1, 4, dtype=dtype)
        with torch.inference_mode():
            right = call(given)
            put(key, None, Forms([]), device)
            for _ in range(2):
                result = call(given)
                assert (result.dtype, result.tolist()) == (right.dtype, right.tolist())

    def test_a_tensor_of_another_device_does_not_go_by_the_plan(
        self, put: Any, kernel: Kernel, device: HostDevice
    ) -> None:
        """Given a plan, when the same shapes come on another device than the current one, then it is not used."""

        class Elsewhere(torch.Tensor):
            def get_device(self) -> int:
                return 1

        put("add.Tensor", add(kernel), Forms([measured(FORM)]), device)
        with torch.inference_mode():
            for _ in range(3):
                torch.add(tensor(1, 2), tensor(1, 1))
            launches = len(kernel.launches)
            torch.add(tensor(1, 2).as_subclass(Elsewhere), tensor(1, 1).as_subclass(Elsewhere))
        assert len(kernel.launches) == launches > 0

    def test_a_graphs_function_that_raises_leaves_the_call_to_pytorch(
        self, put: Any, device: HostDevice, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Given a FlagGems that raises in the warm-up, when called and captured, then values are PyTorch's."""

        def fails(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such kernel")

        put("add.Tensor", fails, Forms([measured(FORM)]), device, kind=GraphOperator)
        with torch.inference_mode(), caplog.at_level(logging.WARNING):
            for device.capturing in (False, False, True):
                assert torch.add(tensor(1, 2), tensor(1, 1)).tolist() == [2, 3]
        assert len(caplog.records) == 1

    def test_small_calls_are_pytorchs_at_once(self, put: Any, kernel: Kernel, device: HostDevice) -> None:
        """Given a least size, when smaller calls come, with tensors or a number, then nothing is kept of them."""
        operator = put("add.Tensor", add(kernel), Forms([measured(FORM)]), device, least_size=3)
        with torch.inference_mode():
            for _ in range(3):
                assert torch.add(tensor(1, 2), tensor(1, 1)).tolist() == [2, 3]
                assert torch.add(tensor(1, 2), 1).tolist() == [2, 3]
        assert not kernel.launches
        assert operator.taken() == 0

    def test_what_is_kept_is_bounded(
        self, put: Any, kernel: Kernel, device: HostDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Given room for three kinds of calls, when ten come, then three are kept and a forgotten one is right."""
        monkeypatch.setattr(planned, "MOST_CALLS", 3)
        forms = Forms([measured(f"add.Tensor(int64 {size}, int64 {size})") for size in (1, 10)])
        operator = put("add.Tensor", add(kernel), forms, device)
        with torch.inference_mode():
            for _ in range(2):
                for size in range(1, 11):
                    for _ in range(3):
                        ones = torch.ones(size, dtype=torch.int64)
                        assert torch.add(ones, ones).tolist() == [2] * size
        assert operator.taken() == 3
