"""``python -m sglang_fl config``: every setting, its value and its source."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from sglang_fl.config import load_settings


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: field to value and source.")
def command(as_json: bool) -> None:
    """Show every setting with its value and where it comes from.

    What is set wrongly is reported as the server would report it, with exit code 1.
    """
    from sglang_fl.devices import detect_platform

    settings = load_settings(platform=detect_platform())
    if as_json:
        rows = {row.field: {"value": row.value, "source": row.source.where} for row in settings.rows()}
        click.echo(json.dumps({"settings": rows, "warnings": list(settings.warnings)}, indent=1))
        return
    table = Table("setting", "value", "from", box=None)
    for row in settings.rows():
        table.add_row(row.field, row.value, row.source.where)
    console = Console(emoji=False, markup=False)
    console.print(table)
    for warning in settings.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)
