"""The report as tables for people; colours only on a terminal, the problems last, where the eye is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sglang_fl.cli.doctor.report import Choice, Finding, Hooks, Report

_PLAIN_WIDTH = 140  # in a file or a pipe, unless COLUMNS says otherwise
_STATES = {True: "[green]on[/]", False: "off", None: "[yellow]unknown[/]"}


def console() -> Console:
    """Standard output, as wide as the terminal."""
    out = Console(highlight=False, emoji=False)
    if not out.is_terminal and out.width <= 80:
        return Console(highlight=False, emoji=False, width=_PLAIN_WIDTH)
    return out


def show(report: Report, out: Console) -> None:
    """Everything, section by section."""
    _section(out, "Versions", ("", "version", ""), ((each.name, each.value, each.note) for each in report.versions))
    _section(out, "Device", ("", "", ""), ((each.name, each.value, each.note) for each in report.device))
    rows = ((each.field, each.value, each.source) for each in report.settings)
    _section(out, "Settings", ("setting", "value", "from"), rows)
    _section(
        out, "Layers", ("layer", "", "why"), ((each.name, _STATES[each.is_on], each.reason) for each in report.layers)
    )
    _choices(out, "Fused operators", "operator", report.operators)
    _choices(out, "Collectives", "collective", report.collectives)
    _section(out, "Hooks", ("process", "live", ""), map(_hooks, report.hooks))
    _network(out, report)
    _findings(out, "Warnings", "yellow", report.warnings)
    _findings(out, "Problems", "red", report.problems)
    if report.is_right:
        out.print("[green]OK: nothing that was asked for is in the way.[/]")
    else:
        number = len(report.problems)
        out.print(f"[red]{number} problem{'s' if number > 1 else ''}: see above, each with what to do.[/]")


def _section(out: Console, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*heads, title=title, title_justify="left", title_style="bold", box=None, show_header=any(heads))
    for row in rows:
        marked = [cell if cell in _STATES.values() else escape(cell) for cell in row]
        table.add_row(*marked)
    if table.row_count:
        out.print(table)
        out.print()


def _choices(out: Console, title: str, head: str, choices: Iterable[Choice]) -> None:
    alike: dict[tuple[str, str], list[str]] = {}
    for each in choices:
        notes = [each.note] if each.note else []
        notes += sorted(f"not {other.name}: {other.reason}" for other in each.passed_over)
        alike.setdefault((each.chosen or "nothing", "\n".join(notes)), []).append(each.item)
    rows = [("\n".join(items), chosen, why) for (chosen, why), items in alike.items()]
    _section(out, title, (head, "carried by", ""), rows)


def _hooks(found: Hooks) -> tuple[str, str, str]:
    if found.reason:
        return found.process, "none", found.reason
    return found.process, f"{found.live} of {found.total}", "\n".join(found.dead)


def _network(out: Console, report: Report) -> None:
    seen = report.network
    if not seen.host_name:
        return
    resolved = ", ".join(seen.host_addresses) or "nothing"
    rows = [("host name", seen.host_name, f"resolves to {resolved}{' (loopback)' if seen.host_is_loopback else ''}")]
    for each in seen.interfaces:
        kinds = ["up" if each.is_up else "down", *(["loopback"] if each.is_loopback else [])]
        kinds += ["virtual"] if each.is_virtual else []
        rows.append((f"interface {each.name}", ", ".join(each.addresses) or "no address", ", ".join(kinds)))
    rows += [(each.name, each.value, "is set") for each in seen.variables]
    rows.append(("for several hosts, use", seen.interface or "none", seen.reason))
    if seen.address:
        rows.append(("recommended MASTER_ADDR", seen.address, "on the first host, if that is this one"))
    _section(out, "Network", ("", "", ""), rows)


def _findings(out: Console, title: str, style: str, findings: Sequence[Finding]) -> None:
    if not findings:
        return
    out.print(Text(title, style=f"bold {style}"))
    table = Table(box=None, show_header=False)
    for number, each in enumerate(findings, start=1):
        action = f"\n[bold]What to do:[/] {escape(each.action)}" if each.action else ""
        table.add_row(f"{number}.", f"[{style}]{escape(each.area)}[/]", f"{escape(each.found)}{action}")
    out.print(table)
    out.print()
