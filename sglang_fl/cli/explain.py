"""``python -m sglang_fl explain``: which implementation an operator gets here, and why not the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sglang_fl.dispatch import OpImpl


@click.command("explain")
@click.argument("operator", required=False)
@click.option("--json", "as_json", is_flag=True, help="A JSON list of the same.")
def command(operator: str | None, as_json: bool) -> None:
    """Show each implementation of OPERATOR, such as rms_norm: chosen, or why it was passed over.

    Without OPERATOR: of every operator. What is shown holds for a process with this environment. In a server an
    implementation may be wrong for single layers; where that is possible, it says so.
    """
    from sglang_fl.dispatch.explanation import explanation
    from sglang_fl.dispatch.manager import UnknownOperatorError, get_manager

    manager = get_manager()
    try:
        names = [operator] if operator else manager.operators()
        found = [explanation(name, extra=_sglangs_own(name)) for name in names]
    except UnknownOperatorError as error:
        raise click.BadParameter(str(error), param_hint="OPERATOR") from error
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found], indent=1))
        return
    click.echo("\n".join(map(str, found)))
    for line in _notes():
        click.echo(f"note: {line}")


def _notes() -> list[str]:
    """What of the settings keeps the above from happening in a server, and names in them that nobody knows."""
    from sglang_fl.dispatch.policy import process_settings
    from sglang_fl.plugin import unknown_vendors
    from sglang_fl.sglang_hooks.operators.layer import off_reason, unknown_names
    from sglang_fl.sglang_hooks.operators.lists import ClassLists

    settings = process_settings()
    off = off_reason(settings)
    lists = ClassLists.from_settings(settings).describe()
    notes = [f"layer 2 is off, SGLang's own methods run: {off}"] if off else []
    if lists and not off:
        notes.append(f"not every class is taken over: {lists}; the others keep SGLang's own method")
    return [*notes, *unknown_names(settings), *unknown_vendors(settings)]


def _sglangs_own(op_name: str) -> Sequence[OpImpl]:
    """SGLang's own method, a candidate in a server, by a name that tells it from the vendor's own backend."""
    from sglang_fl.dispatch.policy import process_settings
    from sglang_fl.dispatch.registry import KNOWN_OPERATORS
    from sglang_fl.plugin import has_own_kernels
    from sglang_fl.sglang_hooks.operators.own_method import own_method

    if op_name not in KNOWN_OPERATORS:
        return ()
    platform = process_settings().system.platform
    found = own_method(op_name, platform, has_own_kernels(platform))
    return [replace(impl, impl_id=f"{impl.impl_id} (SGLang's own method)") for impl in found]
