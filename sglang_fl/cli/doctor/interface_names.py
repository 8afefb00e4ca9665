"""Variables that name interfaces: gloo wants one plain name, NCCL and FlagCX have a language of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_fl.cli.doctor.report import Interface

GLOO = "GLOO_SOCKET_IFNAME"
# Both take prefixes; = makes them whole names, ^ means all but these.
WITH_PREFIXES = ("NCCL_SOCKET_IFNAME", "FLAGCX_SOCKET_IFNAME")


@dataclass(frozen=True)
class Verdict:
    """``problem``: it cannot work; ``warning``: it may not be what was meant; both empty if it is right."""

    problem: str = ""
    warning: str = ""


def gloo(text: str, interfaces: Sequence[Interface], is_several_hosts: bool) -> Verdict:
    """What torch 2.11's gloo does with ``text``: split at commas, each part the beginning of an interface's name.

    It has no ``^`` and no ``=``, and keeps spaces. For each part it makes one connection of every pair of ranks.
    """
    parts = [part for part in text.split(",") if part]
    with_address = [each for each in interfaces if each.addresses]
    for part in parts:
        matching = [each.name for each in with_address if each.name.startswith(part)]
        if not matching:
            return Verdict(
                problem=f"gloo takes one plain name and finds no interface for {part!r}{_why(part, interfaces)}"
            )
    chosen = [next(each for each in with_address if each.name.startswith(part)) for part in parts]
    if is_several_hosts and any(each.is_loopback for each in chosen):
        return Verdict(problem="it is the loopback, on which no other host is reached")
    if text.count(",") or len(parts) != 1:
        return Verdict(warning="gloo takes one plain name; with several, every rank must name as many")
    if parts[0] != chosen[0].name:
        text = f"gloo takes one plain name; here the first that begins with {parts[0]!r}, which is {chosen[0].name}"
        return Verdict(warning=text)
    return Verdict()


def _why(part: str, interfaces: Sequence[Interface]) -> str:
    if part[0] in "^=":
        return f": it does not know NCCL's {part[0]!r}"
    if part != part.strip():
        return ": the space belongs to the name"
    if any(each.name == part for each in interfaces):
        return ", which has no address"
    return ""


def with_prefixes(text: str, interfaces: Sequence[Interface]) -> Verdict:
    """What NCCL's language makes of ``text``; at least one interface must be left."""
    is_exclusion = text.startswith("^")
    rest = text.removeprefix("^")
    is_exact = rest.startswith("=")
    names = [name for name in rest.removeprefix("=").split(",") if name]

    def fits(interface: Interface) -> bool:
        named = any(interface.name == name if is_exact else interface.name.startswith(name) for name in names)
        return named is not is_exclusion

    usable = [each for each in interfaces if each.is_up and each.addresses]
    if any(fits(each) for each in usable):
        return Verdict()
    return Verdict(problem="it leaves no interface that is up and has an address")
