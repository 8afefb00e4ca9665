"""Faults that can be switched on while a server runs, also inside its CUDA graphs: they must change its answers.

Each is captured as a multiplication or a selection whose operand lies in device memory: 1, or the order that is
right, until the file of the switch names the fault. Every rank reads the file before each forward pass; write it
between requests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FACTOR = 1.5
OFF = "none"


class Switch:
    """The operands of one process, and what the switch's file said last."""

    def __init__(self, path: Path, device: torch.device, ranks: int) -> None:
        self.path = path
        self.state = OFF
        self.factors = {name: torch.ones((), device=device) for name in ("all_reduce", "silu_and_mul")}
        self.order = torch.arange(ranks, device=device)
        self.is_armed = False

    def follow(self) -> None:
        """Do what the file says, if that is new."""
        state = self.path.read_text()
        if state == self.state:
            return
        self.state = state
        for name, factor in self.factors.items():
            factor.fill_(FACTOR if state == name else 1.0)
        ranks = len(self.order)
        right = torch.arange(ranks, device=self.order.device)
        self.order.copy_(right.flip(0) if state == "all_gather" else right)


_switch: Switch | None = None


def follow_switch(*_: Any, **__: Any) -> None:
    """Before each forward pass of SGLang's model runner; changes none of its arguments."""
    if _switch is not None:
        _switch.follow()


def install(model: torch.nn.Module, path: Path) -> dict[str, str]:
    """Put the faults in, switched off; where each is, by name. Those of collectives need two ranks.

    The layers are those in the middle of the model; an all_gather is any of the group that gathers logits.
    """
    from sglang.srt.distributed import get_tp_group

    global _switch
    group = get_tp_group()
    device = next(model.parameters()).device
    switch = _switch = Switch(path, device, group.world_size)
    places = {}
    activations = [found for found in model.named_modules() if type(found[1]).__name__ == "SiluAndMul"]
    if activations:
        places["silu_and_mul"], activation = activations[len(activations) // 2]
        factor = switch.factors["silu_and_mul"]
        activation.register_forward_hook(lambda _, __, output: output * factor)
    if group.world_size > 1:
        places["all_reduce"], layer = _middle_layer(model)
        layer.register_forward_pre_hook(lambda *_: setattr(switch, "is_armed", True))
        layer.register_forward_hook(lambda *_: setattr(switch, "is_armed", False))
        group.all_reduce = scaled_all_reduce(group.all_reduce, switch)
        places["all_gather"] = group.unique_name
        group.all_gather = reordered_all_gather(group.all_gather, switch)
    return places


def scaled_all_reduce(original: Callable[..., torch.Tensor], switch: Switch) -> Callable[..., torch.Tensor]:
    """The first all_reduce after the switch was armed is multiplied by its factor."""
    factor = switch.factors["all_reduce"]

    def all_reduce(*arguments: Any, **named: Any) -> torch.Tensor:
        result = original(*arguments, **named)
        if not switch.is_armed:
            return result
        switch.is_armed = False
        return result * factor

    return all_reduce


def reordered_all_gather(original: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """The ranks' parts of a gathered tensor in the switch's order."""

    def all_gather(tensor: torch.Tensor, dim: int = -1, *more: Any, **named: Any) -> Any:
        result = original(tensor, dim, *more, **named)
        if not isinstance(result, torch.Tensor):
            return result
        place = dim % result.dim()
        size = result.shape
        parts = result.reshape(*size[:place], len(switch.order), -1, *size[place + 1 :])
        return parts.index_select(place, switch.order).reshape(size)

    return all_gather


def _middle_layer(model: torch.nn.Module) -> tuple[str, torch.nn.Module]:
    lists = [found for found in model.named_modules() if isinstance(found[1], torch.nn.ModuleList)]
    name, layers = max(lists, key=lambda found: len(list(found[1].children())))
    place = len(list(layers.children())) // 2
    return f"{name}.{place}", list(layers.children())[place]
