"""What can be told without importing anything heavy: versions, where the package lies, the network."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import sglang_fl
from sglang_fl.cli.doctor import interface_names, network
from sglang_fl.cli.doctor.report import Fact, Finding, Network, Report

# Distribution to what it is for; versions come from the metadata, nothing is imported.
_PACKAGES = {
    "sglang": "the server",
    "torch": "",
    "triton": "what FlagGems' kernels are written in",
    "flag_gems": "layers 1 and 2",
    "sglang-kernel": "SGLang's CUDA kernels",
    "torch_npu": "Ascend's torch",
    "torch_musa": "Moore Threads' torch",
}
_ALWAYS = ("sglang", "torch", "triton", "flag_gems")
_NAME = "sglang_fl"


def versions() -> Report:
    """Python, this package and where it lies, and the packages that matter."""
    here = Path(sglang_fl.__file__).parent
    report = Report(versions=[Fact("Python", platform.python_version(), sys.executable)])
    report.versions.append(Fact(_NAME, sglang_fl.__version__, str(here)))
    for name, purpose in _PACKAGES.items():
        try:
            report.versions.append(Fact(name, version(name), purpose))
        except PackageNotFoundError:
            if name in _ALWAYS:
                report.versions.append(Fact(name, "not installed", purpose))
    installed = {str(each.locate_file("")): each.version for each in distributions(name=_NAME)}
    if len(set(installed.values())) > 1:
        places = ", ".join(f"{number} in {place}" for place, number in installed.items())
        report.warnings.append(
            Finding("versions", f"more than one {_NAME} is installed: {places}", "Uninstall all, install one.")
        )
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        text = "PYTHONDONTWRITEBYTECODE is set: every start of a server takes twice as long as it should"
        report.warnings.append(Finding("versions", text, "Unset it."))
    return report


def network_of(environment: Mapping[str, str], nnodes: int | None, master: str | None) -> Report:
    """Interfaces, the host name, and the variables that name interfaces; ``nnodes``, ``master``: as for torchrun."""
    found = network.interfaces()
    several = nnodes > 1 if nnodes is not None else network.is_several_hosts(environment)
    given = master or environment.get("MASTER_ADDR", "")
    masters, why_not = network.resolve(given) if given else ((), "")
    host = socket.gethostname()
    addresses, unresolved = network.resolve(host)
    remote = next((each for each in masters if not network.is_loopback(each)), "")
    use, reason = network.to_use(found, remote, network.default_interface())
    report = Report(
        network=Network(
            interfaces=found,
            host_name=host,
            host_addresses=addresses,
            host_is_loopback=any(map(network.is_loopback, addresses)),
            interface=use.name if use else "",
            address=use.addresses[0] if use else "",
            reason=reason,
            variables=tuple(_variables(environment)),
        )
    )
    _judge_names(report, environment, several)
    if several and use is None:
        _tell(report, True, f"a run on several hosts is not possible: {reason}", "Bring a network interface up.")
    _judge_host(report, environment, several, unresolved)
    if given:
        _judge_master(report, given, masters, why_not, several)
    return report


def _variables(environment: Mapping[str, str]) -> Iterable[Fact]:
    for name in (interface_names.GLOO, *interface_names.WITH_PREFIXES, "MASTER_ADDR", "SGLANG_HOST_IP"):
        if environment.get(name):
            yield Fact(name, environment[name])


def _tell(report: Report, is_problem: bool, found: str, action: str) -> None:
    (report.problems if is_problem else report.warnings).append(Finding("network", found, action))


def _judge_names(report: Report, environment: Mapping[str, str], several: bool) -> None:
    found = report.network.interfaces
    use = report.network.interface
    name = interface_names.GLOO
    action = f"export {name}={use}" if use else f"Unset {name}."
    for variable in (name, *interface_names.WITH_PREFIXES):
        text = environment.get(variable, "")
        if not text:
            continue
        if variable == name:
            verdict = interface_names.gloo(text, found, several)
        else:
            verdict = interface_names.with_prefixes(text, found)
            action = f"export {variable}={use}" if use else f"Unset {variable}."
        if verdict.problem or verdict.warning:
            _tell(report, bool(verdict.problem), f"{variable}={text}: {verdict.problem or verdict.warning}", action)


def _judge_host(report: Report, environment: Mapping[str, str], several: bool, unresolved: str) -> None:
    seen = report.network
    if seen.host_addresses and not seen.host_is_loopback:
        return
    if seen.host_addresses:
        resolved = ", ".join(seen.host_addresses)
        text = f"the host name {seen.host_name} resolves to {resolved}, which other hosts cannot reach"
    else:
        text = f"the host name {seen.host_name} does not resolve: {unresolved}"
    if not several:
        text += "; on one host that does no harm"
    has_interface = bool(environment.get(interface_names.GLOO))
    action = f"Let /etc/hosts say {seen.address or 'ADDRESS'} {seen.host_name}, or, on each host,"
    action += f" export {interface_names.GLOO}={seen.interface or 'INTERFACE'}"
    action += f" and give torchrun --local-addr={seen.address or 'ADDRESS'}."
    _tell(report, several and not has_interface, text, action)


def _judge_master(report: Report, given: str, masters: tuple[str, ...], why_not: str, several: bool) -> None:
    seen = report.network
    action = "It is the first host's address on the interface between the hosts"
    action += f"; if that is this one: {seen.address}." if seen.address else "."
    if not masters:
        _tell(report, True, f"MASTER_ADDR={given} does not resolve: {why_not}", action)
    elif several and all(map(network.is_loopback, masters)):
        text = f"MASTER_ADDR={given} is {', '.join(masters)}, where other hosts find themselves and not this one"
        _tell(report, True, text, action)
    elif not any(network.is_loopback(each) or network.address_towards(each) for each in masters):
        _tell(report, True, f"there is no way to MASTER_ADDR={given} ({', '.join(masters)})", action)
