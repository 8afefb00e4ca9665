"""Which calls of an operator the stored table speaks for: its forms, and within a form the sizes."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from sglang_fl.aten.sweep.cases import ACCELERATOR, Case, encode

_TENSOR = re.compile(r"(?P<dtype>[a-z]\w*) (?P<shape>scalar|\d+(?:x\d+)*)(?P<strides> strides \[[\d, ]*\])?")
_NAMED = re.compile(r"(?P<name>[a-z_]\w*)=(?P<value>.*)", re.DOTALL)
# The least gain of what may be a little slower, as the rule of the table allows.
NOT_SLOWER = -sys.float_info.max
# So many times the largest measured size is taken to behave as that; batches grow, and kernels change with size.
_BEYOND = 16
# Arguments of these types are data, as a tensor's elements are: their values do not make another form.
_DATA = ("Tensor", "number")
_NUMBER_TYPES = {True: "float", False: "int"}


@dataclass(frozen=True)
class CallForm:
    """A call without its sizes: dtypes, numbers of dimensions, whether contiguous, plain arguments; and its size.

    text: equal for calls of one form. size: elements of all tensors together. first: those of the first tensor.
    has_empty: whether a tensor has none.
    """

    text: str
    size: int
    first: int
    has_empty: bool


@dataclass(frozen=True)
class Measured:
    """What is known of one call.

    is_exact: FlagGems' values are PyTorch's and the right ones. gain_us: GPU time that it saves a call, minus infinity
    where it is slower than allowed; None where the time was not taken.
    """

    call: str
    is_right: bool
    is_exact: bool
    gain_us: float | None


@dataclass
class _Form:
    is_right: bool = True
    is_exact: bool = True
    # Size to what FlagGems saves there, and to the elements of the first tensor.
    sizes: dict[int, float] = field(default_factory=dict)
    firsts: dict[int, int] = field(default_factory=dict)

    def gain_us(self, size: int) -> float:
        """The lesser gain of the measured sizes next to ``size``, from below and from above."""
        if not self.sizes or size > _BEYOND * max(self.sizes):
            return -math.inf
        below = max((known for known in self.sizes if known <= size), default=None)
        above = min((known for known in self.sizes if known >= size), default=None)
        return min(self.sizes[known] for known in (below, above) if known is not None)


class Forms:
    """Which calls FlagGems may take: those of a form that was right wherever it was tried, and that was not slower at
    the measured sizes next to the call's, from below and from above. Calls without a tensor are not taken.
    """

    def __init__(self, measured: Iterable[Measured]) -> None:
        """Empty calls say nothing, and are not taken: PyTorch has no work with them."""
        self._forms: dict[str, _Form] = {}
        for one in measured:
            call = form_of_text(one.call)
            if call.has_empty:
                continue
            form = self._forms.setdefault(call.text, _Form())
            form.is_right = form.is_right and one.is_right
            form.is_exact = form.is_exact and one.is_exact
            if one.gain_us is not None:
                # Of two calls of one size the slower one counts.
                form.sizes[call.size] = min(one.gain_us, form.sizes.get(call.size, math.inf))
                form.firsts[call.size] = min(call.first, form.firsts.get(call.size, call.first))

    def take(self, call: CallForm, least_gain_us: float = NOT_SLOWER, exact_only: bool = False) -> bool:
        """Whether FlagGems may take ``call``.

        least_gain_us: what it must save on the GPU. exact_only: whether its values must be PyTorch's bit for bit.
        """
        form = self._forms.get(call.text)
        if form is None or call.has_empty or not call.size or not form.is_right or (exact_only and not form.is_exact):
            return False
        return form.gain_us(call.size) >= least_gain_us

    def least_sizes(self, least_gain_us: float = NOT_SLOWER) -> dict[str, int]:
        """Each ATen operator of which a measured call is taken, and the fewest elements of its first tensor there."""
        found: dict[str, int] = {}
        for text, form in self._forms.items():
            operator = text.partition("(")[0]
            for size, gain_us in form.sizes.items():
                if size and form.is_right and gain_us >= least_gain_us:
                    found[operator] = min(form.firsts[size], found.get(operator, size))
        return found


def form_of_call(operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallForm | None:
    """The form of a call that is being made; None where an argument is of a kind that no recorded call has."""
    try:
        written = [
            encode(list(args), _on_accelerator),
            {name: encode(kwargs[name], _on_accelerator) for name in kwargs},
        ]
    except TypeError:
        return None
    return form_of_text(Case(operator, written[0], written[1]).describe())


def form_of_text(call: str) -> CallForm:
    """The form of a call as the table writes it."""
    operator, _, rest = call.partition("(")
    types = _argument_types(operator)
    tensors: list[int] = []
    parts = []
    for place, piece in enumerate(_pieces(rest.removesuffix(")"))):
        named = _NAMED.fullmatch(piece)
        name, value = (named["name"], named["value"]) if named else (place, piece)
        text = _without_sizes(value, types.get(name, ""), tensors)
        parts.append(f"{name}={text}" if named else text)
    return CallForm(f"{operator}({', '.join(parts)})", sum(tensors), tensors[0] if tensors else 0, 0 in tensors)


def _on_accelerator(tensor: torch.Tensor) -> dict[str, Any]:
    return {"device": ACCELERATOR}


def _pieces(text: str) -> Iterator[str]:
    """Split at commas outside of brackets."""
    depth, begin = 0, 0
    for place, character in enumerate(text):
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            yield text[begin:place].strip()
            begin = place + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _without_sizes(value: str, kind: str, tensors: list[int]) -> str:
    tensor = _TENSOR.fullmatch(value)
    if tensor is not None:
        sizes = [] if tensor["shape"] == "scalar" else [int(size) for size in tensor["shape"].split("x")]
        tensors.append(math.prod(sizes))
        return f"{tensor['dtype']}[{len(sizes)}]{'~' if tensor['strides'] else ''}"
    if value.startswith("["):
        return f"[{', '.join(_without_sizes(item, kind, tensors) for item in _pieces(value[1:-1]))}]"
    if kind.startswith(_DATA) and _is_number(value):
        return _NUMBER_TYPES[not value.lstrip("-").isdigit()]
    return value


def _is_number(value: str) -> bool:
    if value in ("True", "False", "None"):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


@cache
def _argument_types(operator: str) -> Mapping[int | str, str]:
    """Type by place and by name."""
    base, _, overload = operator.partition(".")
    found = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    types: dict[int | str, str] = {}
    # Another version of PyTorch may not have an operator of the table.
    for place, argument in enumerate(found._schema.arguments if found is not None else ()):
        types[place] = types[argument.name] = str(argument.type).removeprefix("Optional[").removesuffix("]")
    return types
