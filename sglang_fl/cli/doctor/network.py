"""The network as other hosts would see it: interfaces, what the host name resolves to, which interface to use."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_fl.cli.doctor.report import Interface
from sglang_fl.config.numbers import whole_number

_RESOLVE_LIMIT_S = 3.0
_UP, _LOOPBACK = 0x1, 0x8  # net/if.h
# Made by container runtimes, hypervisors and tunnels: other hosts do not reach this one through them.
_VIRTUAL = ("docker", "br-", "veth", "virbr", "vmnet", "cni", "flannel", "cali", "kube", "tun", "tap", "ifb", "dummy")


class _Entry(ctypes.Structure):
    """``struct ifaddrs`` of getifaddrs(3)."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interfaces() -> tuple[Interface, ...]:
    """Every interface of this process's network namespace with its IPv4 and then its IPv6 addresses.

    Link-local IPv6 addresses are left out: they name no host without an interface beside them.

    Raises:
        OSError: the system does not say.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    flags: dict[str, int] = {}
    found: dict[str, list[str]] = {}
    try:
        for entry in _entries(head):
            name = entry.name.decode()
            flags[name] = entry.flags
            address = _address(entry.address)
            own = found.setdefault(name, [])
            if address is not None and not (address.version == 6 and address.is_link_local):
                own.append(str(address))
    finally:
        libc.freeifaddrs(head)
    return tuple(
        Interface(
            name,
            tuple(sorted(addresses, key=lambda text: ":" in text)),
            is_up=bool(flags[name] & _UP),
            is_loopback=bool(flags[name] & _LOOPBACK),
            is_virtual=name.startswith(_VIRTUAL),
        )
        for name, addresses in found.items()
    )


def _entries(head: ctypes._Pointer[_Entry]) -> Iterator[_Entry]:
    pointer = head
    while pointer:
        yield pointer.contents
        pointer = pointer.contents.next


def _address(pointer: int | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if not pointer:
        return None
    family = ctypes.c_uint16.from_address(pointer).value  # struct sockaddr
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return ipaddress.IPv6Address(ctypes.string_at(pointer + 8, 16))
    return None


def resolve(host: str, limit_s: float = _RESOLVE_LIMIT_S) -> tuple[tuple[str, ...], str]:
    """The addresses of ``host``, or none and why. A name server that does not answer is given ``limit_s`` seconds."""
    found: list[tuple[str, ...]] = []
    reasons: list[str] = []

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.append(tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)))
        except (OSError, UnicodeError) as error:
            reasons.append(str(error))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(limit_s)
    if found:
        return found[0], ""
    return (), reasons[0] if reasons else f"no answer within {limit_s:g} s"


def is_loopback(address: str) -> bool:
    """Whether ``address`` reaches this host alone."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def address_towards(address: str) -> str:
    """This host's address on the way to ``address``; empty if there is no way. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def default_interface(routes: str | None = None) -> str:
    """The interface of the default IPv4 route; empty if there is none. ``routes``: as of /proc/net/route."""
    if routes is None:
        try:
            routes = Path("/proc/self/net/route").read_text()
        except OSError:
            return ""
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 2 and fields[1] == "00000000":
            return fields[0]
    return ""


def to_use(found: Sequence[Interface], towards: str = "", default: str = "") -> tuple[Interface | None, str]:
    """The interface through which other hosts reach this one, and why it.

    Args:
        found: all of them.
        towards: an address of the first host; its route decides.
        default: the interface of the default route.
    """
    usable = [each for each in found if each.is_up and each.addresses and not each.is_loopback]
    by_name = {each.name: each for each in usable}
    if towards:
        own = address_towards(towards)
        on_the_way = next((each for each in usable if own in each.addresses), None)
        if on_the_way is not None:
            return on_the_way, f"it leads to {towards}"
    if default in by_name:
        return by_name[default], "the default route goes through it"
    real = [each for each in usable if not each.is_virtual]
    if real:
        others = f" of {len(real)}" if len(real) > 1 else ""
        return real[0], f"the first{others} that is up, has an address and is no container's or tunnel's"
    if usable:
        return usable[0], "no other is up and has an address"
    return None, "no interface but the loopback is up and has an address"


def is_several_hosts(environment: Mapping[str, str]) -> bool:
    """Whether a launcher's variables speak of more ranks than this host has."""
    world, local = (whole_number(environment.get(name, "")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return world is not None and local is not None and world > local
