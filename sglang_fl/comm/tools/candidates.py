"""Each backend as a route of its own: a communicator that must use it, or the reason why it cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sglang_fl.comm.agreement import ITEM, agree
from sglang_fl.comm.communicator import CommunicatorFL
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import AgreementError
from sglang_fl.comm.policy import communicator_order, communicator_policy
from sglang_fl.comm.sizes import add_routes, settings_to_agree_on
from sglang_fl.comm.tools.launch import Launch
from sglang_fl.config import CommMode
from sglang_fl.selection import Kind


@dataclass(frozen=True)
class Route:
    """One backend on the group of all ranks.

    Attributes:
        name: the backend's.
        communicator: None if it cannot be used.
        reason: why not; the same text on every rank.
        has_failed: it said that it is available, and then could not be created. Not so for a backend of routes alone:
            whether the ranks' devices reach each other is seen when they come together.
    """

    name: str
    communicator: CommunicatorFL | None
    reason: str = ""
    has_failed: bool = False


# The name under which the routes by size of mode fastest are tried together, on the group's own backend.
ROUTES = "routes"


def known_names(launch: Launch) -> list[str]:
    """Backends that any rank knows, flagos first, reference last, then the settings' routes, if they are in use.

    All ranks must call it.
    """
    own = {name: list(Kind).index(backend.kind) for name, backend in discover_backends().backends.items()}
    places: dict[str, int] = {}
    for known in launch.exchange("tell known backends", own):
        places.update(known)
    names = sorted(places, key=lambda name: (places[name], name))
    comm = launch.settings.comm
    return [*names, ROUTES] if comm.mode is CommMode.FASTEST and comm.routes else names


def asked_for(launch: Launch, named: list[str]) -> list[str]:
    """Those that must be usable: named on the command line, or else by the settings."""
    if named:
        return named
    first = communicator_order(launch.settings)[0]
    kinds = {kind.value for kind in Kind}
    return [] if first in kinds or first.startswith(f"{Kind.VENDOR.value}:") else [first]


@contextmanager
def opened(launch: Launch, name: str) -> Iterator[Route]:
    """The route over backend ``name``, closed at the end. All ranks must enter."""
    route = _open(launch, name)
    try:
        yield route
    finally:
        if route.communicator is not None:
            route.communicator.destroy()


def _open(launch: Launch, name: str) -> Route:
    if name == ROUTES:
        return _open_routes(launch)
    context = replace(launch.context, name=f"{launch.context.name}:{name}")
    reasons = launch.exchange(f"probe {name}", _refusal(launch, name))
    refused = [rank for rank, reason in enumerate(reasons) if reason]
    if refused:
        where = "" if len(refused) == len(reasons) else f"rank(s) {', '.join(map(str, refused))}: "
        return Route(name, None, where + reasons[refused[0]])
    policy = replace(communicator_policy(launch.settings), per_item={ITEM: (name,)}, strict=True)
    backends = {name: discover_backends().backends[name]}
    try:
        agreed = agree(context, backends, policy)
    except AgreementError as error:
        return Route(name, None, str(error), has_failed=not backends[name].is_route_only)
    return Route(name, CommunicatorFL.from_agreed(context, agreed))


def _open_routes(launch: Launch) -> Route:
    context = replace(launch.context, name=f"{launch.context.name}:{ROUTES}")
    backends, policy = discover_backends().backends, communicator_policy(launch.settings)
    comm = launch.settings.comm
    try:
        agreed = agree(context, backends, policy, also_equal=settings_to_agree_on(comm))
        agreed, words = add_routes(context, agreed, comm.routes, backends, policy)
    except AgreementError as error:
        return Route(ROUTES, None, str(error), has_failed=True)
    launch.say(f"# {ROUTES}: {'; '.join(words)}")
    communicator = CommunicatorFL.from_agreed(context, agreed, routes=words)
    communicator.backend = ROUTES
    return Route(ROUTES, communicator)


def _refusal(launch: Launch, name: str) -> str:
    registry = discover_backends()
    backend = registry.backends.get(name)
    if backend is None:
        failures = "".join(f"; {source} did not register: {text}" for source, text in registry.failures.items())
        return f"no backend of this name is installed, there are {', '.join(sorted(registry.backends))}{failures}"
    availability = backend.probe(launch.context)
    return "" if availability.available else availability.reason
