"""The function that a binding calls: the implementation itself, or one that knows who is next and tells who failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from sglang_fl.dispatch.contracts import hands_inputs_over
from sglang_fl.dispatch.rules import refusal_of_call
from sglang_fl.dispatch.types import NotSupportedError, OpImpl, OwnMethodError

logger = logging.getLogger("sglang_fl.dispatch")
Function = Callable[..., Any]
After = Callable[[Exception, Sequence[Any], dict[str, Any], int | None], Any]
_MAIN_INPUT = 1  # behind the layer

# After one of these the device, or its memory, is not what it was: another try hides the cause or fails as well.
_DEVICE_ERRORS: tuple[type[BaseException], ...] = tuple(
    error
    for error in (MemoryError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", None))
    if error is not None
)
_DEVICE_ERROR_WORDS = (
    "cuda error", "cublas_status", "cudnn_status", "triton error", "npu error", "hip error", "musa error",
    "device-side assert", "illegal memory access", "out of memory",
)  # fmt: skip


class Asking(Enum):
    """When an implementation's rules on layer, dtype and device are asked, beyond the selection."""

    NEVER = "the selection has settled them"
    FIRST_CALL = "until one call of the one layer was right"
    EVERY_CALL = "each call may have another layer"


class Reports:
    """Log lines about failures, each once per operator, implementation and kind of error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str, str]] = set()

    def log(self, level: int, op_name: str, impl_id: str, error: BaseException, consequence: str) -> None:
        """Say that ``impl_id`` raised ``error`` and what follows from it."""
        kind = type(error).__name__
        with self._lock:
            if (op_name, impl_id, kind) in self._seen:
                return
            self._seen.add((op_name, impl_id, kind))
        logger.log(level, "[sglang_fl] %s: %s raised %s: %s; %s", op_name, impl_id, kind, error, consequence)


@dataclass(frozen=True)
class Call:
    """How a binding is called.

    Attributes:
        fn: the function to call.
        first: the first implementation alone, for a caller that guards the call itself and saves the guard's time.
        after: what ``fn`` does when ``first`` raised, given the error, the call's arguments, and the version counter
            that its main input, the second argument, had before (None where it keeps none, as in inference mode): the
            result of the next implementation, or the error again.
    """

    fn: Function
    first: Function
    after: After


def make_call(
    op_name: str, impls: Sequence[OpImpl], asking: Sequence[Asking], is_strict: bool, reports: Reports
) -> Call:
    """The function to call, and its parts.

    Args:
        op_name: the operator.
        impls: the usable implementations, best first.
        asking: for each, when its rules are asked.
        is_strict: only the first one may be called.
        reports: where failures are logged.
    """
    functions = [_asking(op_name, impl, when) for impl, when in zip(impls, asking, strict=True)]
    first = functions[0]
    if is_strict:
        return _guarded(first, _strictly(op_name, impls[0], reports))
    if len(functions) == 1:
        return Call(first, first, _raise_again)
    return _guarded(first, _Chain(op_name, impls, functions, reports).after)


def _asking(op_name: str, impl: OpImpl, when: Asking) -> Function:
    function = impl.fn
    if when is Asking.NEVER:
        return function
    is_settled = False

    def asking(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_settled
        if not is_settled:
            reason = refusal_of_call(impl, args, kwargs)
            if reason:
                raise NotSupportedError(f"{op_name}: {impl.impl_id} cannot do this call: {reason}")
            is_settled = when is Asking.FIRST_CALL
        return function(*args, **kwargs)

    return asking


def _guarded(first: Function, after: After) -> Call:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            version = args[_MAIN_INPUT]._version
        except (AttributeError, IndexError, RuntimeError):
            version = _version(args, kwargs)
        try:
            return first(*args, **kwargs)
        except OwnMethodError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again by what decides on it, or reported there
            return after(error, args, kwargs, version)

    return Call(guarded, first, after)


def _version(args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """The version counter of a call's main input, which PyTorch's operations move on when they write to it."""
    inputs = [*args[_MAIN_INPUT : _MAIN_INPUT + 1], *kwargs.values()]
    try:
        version: int = inputs[0]._version
    except (AttributeError, IndexError, RuntimeError):
        return None
    return version


def _raise_again(error: Exception, args: Sequence[Any], kwargs: dict[str, Any], version: int | None) -> Any:
    raise error


def _strictly(op_name: str, impl: OpImpl, reports: Reports) -> After:
    def after(error: Exception, args: Sequence[Any], kwargs: dict[str, Any], version: int | None) -> Any:
        if not isinstance(error, OwnMethodError):
            consequence = "strict mode: nothing else is tried"
            _add_note(error, f"{op_name}: raised by {impl.impl_id}; {consequence}")
            reports.log(logging.ERROR, op_name, impl.impl_id, error, consequence)
        raise error

    return after


class _Chain:
    """What happens after an implementation raised: the next one gets the same call, or the error stands."""

    def __init__(self, op_name: str, impls: Sequence[OpImpl], functions: Sequence[Function], reports: Reports) -> None:
        self._op_name = op_name
        self._ids = [impl.impl_id for impl in impls]
        self._functions = functions
        self._reports = reports

    def after(self, error: Exception, args: Sequence[Any], kwargs: dict[str, Any], version: int | None) -> Any:
        """What follows on ``error`` of the first implementation."""
        if not self.may_go_on(0, error, args, kwargs, version):
            raise error
        return self.go_on([error], args, kwargs)

    def may_go_on(
        self, position: int, error: Exception, args: Sequence[Any], kwargs: dict[str, Any], version: int | None
    ) -> bool:
        """Whether the inputs are surely as they were and somebody is left; otherwise the error gets a note."""
        if isinstance(error, OwnMethodError):
            return False
        impl_id = self._ids[position]
        obstacle = self._obstacle(position, error, args, kwargs, version)
        if obstacle:
            _add_note(error, f"{self._op_name}: raised by {impl_id}; nothing else is tried, {obstacle}")
            return False
        following = f"{self._ids[position + 1]} gets this call"
        level = logging.INFO if isinstance(error, NotSupportedError) else logging.WARNING
        self._reports.log(level, self._op_name, impl_id, error, following)
        return True

    def go_on(self, errors: list[Exception], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the implementation behind those that raised ``errors``, and then, where that is right, the next."""
        position, version = len(errors), _version(args, kwargs)
        try:
            return self._functions[position](*args, **kwargs)
        except Exception as error:
            errors.append(error)
            if self.may_go_on(position, error, args, kwargs, version):
                return self.go_on(errors, args, kwargs)
            if isinstance(error, NotSupportedError):
                raise NotSupportedError(self._nobody(errors)) from error
            raise
        finally:
            # The errors have this frame in their tracebacks: without this they would keep the inputs alive, in a cycle.
            del errors

    def _nobody(self, errors: Sequence[Exception]) -> str:
        said = (f"  {impl_id}: {error}" for impl_id, error in zip(self._ids, errors, strict=True))
        return "\n".join([f"No available implementation for this call of {self._op_name}:", *said])

    def _obstacle(
        self, position: int, error: Exception, args: Sequence[Any], kwargs: dict[str, Any], version: int | None
    ) -> str:
        """Why the next implementation may not get the same call; "" if nothing speaks against it."""
        if position + 1 == len(self._functions):
            return f"there is none after {', '.join(self._ids)}"
        if _is_device_error(error):
            return "the device or its memory failed"
        is_refusal = isinstance(error, NotSupportedError)
        if hands_inputs_over(self._op_name, args, kwargs):
            return "" if is_refusal else "it may have changed the inputs"
        if version is not None:
            return "" if _version(args, kwargs) == version else "it has changed its input"
        return "" if is_refusal else "its input keeps no count of changes, as in inference mode"


def _is_device_error(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, _DEVICE_ERRORS) or any(word in text for word in _DEVICE_ERROR_WORDS)


def _add_note(error: BaseException, text: str) -> None:
    note = f"[sglang_fl] {text}"
    add_note = getattr(error, "add_note", None)  # Python 3.11
    if add_note is not None and note not in getattr(error, "__notes__", ()):
        add_note(note)
