"""Addresses at which a fleet's workers may listen, as a hint for its routers.

`static` takes the addresses of the deployment file. With `kubernetes` each address names a headless
Service, whose ready pods the cluster's DNS lists. When a name does not resolve, its last addresses
stay: losing the registry stops workers from joining, and nothing else.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.config.fleet_sections import Fleet, Prefill
from jaxserve.fleet.worker_frames import WorkerRole
from jaxserve.link.session.channel import resolve, split_address

LOOK_UP_SECONDS = 5.0

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Sequence[str]]


class Place(NamedTuple):
    """Address at which a worker may listen."""

    address: str
    role: WorkerRole
    reserved: bool = False
    """True if the worker takes long prompts, or as a domain long sequences, alone."""


def placed(role: WorkerRole, addresses: Sequence[str], long: int) -> list[Place]:
    """Returns the places of a role's workers, of which the last `long` ones are reserved."""
    first = len(addresses) - long
    return [Place(address, role, n >= first) for n, address in enumerate(addresses)]


class Registry:
    """Places of a fleet. Any thread may read them.

    Args:
      fleet, prefill: sections of the deployment.
      look_up: resolves names.
    """

    def __init__(self, fleet: Fleet, prefill: Prefill, look_up: Resolve = resolve):
        self._fleet, self._look_up = fleet, look_up
        self._roles: list[tuple[WorkerRole, list[str], int]] = [
            ("prefill", fleet.prefill, prefill.long_workers),
            ("domain", fleet.domains, fleet.long_domains),
        ]
        self._known: dict[str, list[str]] = {}
        self._changes: dict[str, Place | None] = {}  # None: removed; replaced, never changed
        self._stopping = threading.Event()
        if fleet.registry == "kubernetes":
            self.look()
            threading.Thread(target=self._run, name="registry", daemon=True).start()

    def places(self) -> list[Place]:
        """All places, in the order of the file, then those that were added."""
        found: dict[str, Place | None] = {}
        for role, names, long in self._roles:
            found |= {one.address: one for one in placed(role, self._resolved(names), long)}
        found |= self._changes
        return [place for place in found.values() if place is not None]

    def add(self, place: Place) -> None:
        """Adds a place, or changes the role of one, until this process ends."""
        self._changes = {**self._changes, place.address: place}

    def remove(self, address: str) -> None:
        """Removes a place."""
        self._changes = {**self._changes, address: None}

    def look(self) -> None:
        """Resolves all names again."""
        for name in (*self._fleet.prefill, *self._fleet.domains):
            try:
                self._known[name] = list(self._look_up(*split_address(name)))
            except (OSError, UnicodeError) as error:
                logger.warning("registry: %s: %s; %s", name, error, self._known.get(name, []))

    def close(self) -> None:
        """Stops resolving names."""
        self._stopping.set()

    def _resolved(self, names: Sequence[str]) -> list[str]:
        if self._fleet.registry == "static":
            return list(names)
        return [address for name in names for address in self._known.get(name, ())]

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_UP_SECONDS):
            self.look()
