"""``python -m sglang_fl explain``: which implementation an operator gets here, and why not the others."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command("explain")
@click.argument("operator", required=False)
@click.option("--json", "as_json", is_flag=True, help="A JSON list of the same.")
def command(operator: str | None, as_json: bool) -> None:
    """Show each implementation of OPERATOR, such as rms_norm: chosen, or why it was passed over.

    Without OPERATOR: of every operator. What is shown holds for this process, with its settings; in a server, a
    layer may be passed over for reasons of its own, and SGLang's own method is a further candidate.
    """
    from sglang_fl.dispatch.explanation import explanation
    from sglang_fl.dispatch.manager import UnknownOperatorError, get_manager

    manager = get_manager()
    try:
        found = [explanation(name) for name in ([operator] if operator else manager.operators())]
    except UnknownOperatorError as error:
        raise click.BadParameter(str(error), param_hint="OPERATOR") from error
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found], indent=1))
        return
    click.echo("\n".join(map(str, found)))
