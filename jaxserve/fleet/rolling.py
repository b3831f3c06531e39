"""Changes of a serving fleet that operators and autoscalers request from a router.

Workers drain and are replaced, are added and removed. A drain is the worker's own state, which it
tells all routers, including those that start later. The list of places is each router's own
(`registry.py`). Behind `POST /roles/...` and `POST /experts/rebalance` on the admin port.
"""

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.fleet_load import worker_status
from jaxserve.fleet.registry import Place, Registry
from jaxserve.fleet.routed import Worker
from jaxserve.fleet.stand_ins import StandIns
from jaxserve.fleet.worker_connections import WorkerConnections
from jaxserve.fleet.worker_frames import DrainMode, WorkerRole
from jaxserve.link.session.channel import split_address

REBALANCE_SECONDS = 20.0
"""Time for the answers of all domains: each reads the counts of its experts."""


class WorkerProposal(msgspec.Struct):
    """A domain's answer to `POST /experts/rebalance`.

    Attributes:
      proposal: fields of a `roles.worker.Proposal`; None: there is none.
      why: why there is none.
    """

    proposal: dict[str, Any] | None = None
    why: str = ""


class FleetProposal(msgspec.Struct):
    """Answers of all domains by address."""

    workers: dict[str, WorkerProposal]


class WorkerStatus(msgspec.Struct, kw_only=True):
    """State of one worker, as this router knows it.

    Attributes:
      worker: address of the worker.
      status: "ready", "suspect", "draining", "drained" (it may be ended) or "absent".
      drain: "finish" or "move" while it accepts no new requests.
      routed: requests of this router there.
      others: requests of other routers there.
      weights: digest of its checkpoint's weights.
      version: version of its software.
      why: why it is absent.
    """

    worker: str
    role: WorkerRole
    status: str
    drain: DrainMode = ""
    routed: int = 0
    others: int = 0
    weights: str = ""
    version: str = ""
    why: str = ""


class Rolling:
    """Carries out changes of a fleet. Any thread may call it.

    Args:
      workers: returns the connected workers by address; called under no lock.
      stand_ins: has workers change their role.
    """

    def __init__(
        self,
        registry: Registry,
        connections: WorkerConnections,
        workers: Callable[[], Mapping[str, Worker]],
        stand_ins: StandIns,
    ):
        self._registry, self._connections, self._workers = registry, connections, workers
        self._stand_ins, self._numbers = stand_ins, itertools.count(1)
        self._rebalances: dict[tuple[str, int], Future[WorkerProposal]] = {}

    def workers(self) -> list[WorkerStatus]:
        """All workers, in the order of the registry."""
        there, why = self._workers(), self._connections.absences()
        return [
            self._status(place, there.get(place.address), why) for place in self._registry.places()
        ]

    def drain(self, address: str, mode: DrainMode) -> WorkerStatus:
        """Makes a worker accept no new requests, or, with an empty mode, accept them again.

        Raises:
          ConfigError: it is not connected.
        """
        worker = self._connected(address)
        self._connections.send(address, frames.Drain(mode))
        return self._status(self._place(address), worker, {})

    def add(self, address: str, role: WorkerRole, long: bool) -> WorkerStatus:
        """Adds an address at which to look for a worker.

        Raises:
          ConfigError: it is no address, or is in the list already.
        """
        split_address(address, "worker")
        if any(place.address == address for place in self._registry.places()):
            raise ConfigError(f"worker {address}: is one of the fleet already")
        place = Place(address, role, long)
        self._registry.add(place)
        return self._status(place, None, {address: "not reached yet"})

    def remove(self, address: str, force: bool) -> WorkerStatus:
        """Removes an address; `force` allows a worker that still has requests, which continue
        elsewhere.

        Raises:
          ConfigError: the address is not in the list, or its worker is not drained.
        """
        place, worker = self._place(address), self._workers().get(address)
        if worker is not None and worker_status(worker) != "drained" and not force:
            raise ConfigError(
                f"worker {address}: is {worker_status(worker)} and has {worker.count} requests; "
                "drain it first, or force it"
            )
        self._registry.remove(address)
        self._connections.forget(address, "it was removed from the fleet")
        return self._status(place, None, {address: "removed"})

    def want(self, domains: int) -> list[WorkerStatus]:
        """Makes this number of workers domains, whatever they began as; see `StandIns.want`."""
        self._stand_ins.want(domains, len(self._registry.places()))
        return self.workers()

    def rebalance(self, *, dry_run: bool) -> FleetProposal:
        """Has every domain rebalance its experts, or only propose it, and returns their answers.
        Domains that share an ffn worker refuse while one of them moves its experts."""
        number, futures = next(self._numbers), {}
        for address, worker in self._workers().items():
            if worker.facts.role == "domain":
                futures[address] = self._rebalances[address, number] = Future()
                self._connections.send(address, frames.Rebalance(number, dry_run))
        wait(futures.values(), REBALANCE_SECONDS)
        silent = WorkerProposal(why=f"no answer within {REBALANCE_SECONDS:g} s")
        for address in futures:
            self._rebalances.pop((address, number), None)
        return FleetProposal(
            {name: one.result() if one.done() else silent for name, one in futures.items()}
        )

    def rebalanced(self, address: str, frame: frames.Rebalanced) -> None:
        """Takes a domain's answer."""
        if (future := self._rebalances.pop((address, frame.number), None)) is not None:
            future.set_result(WorkerProposal(frame.proposal, frame.why))

    def _place(self, address: str) -> Place:
        places = {place.address: place for place in self._registry.places()}
        if address not in places:
            raise ConfigError(
                f"worker {address}: not one of the fleet, which has {', '.join(places)}"
            )
        return places[address]

    def _connected(self, address: str) -> Worker:
        self._place(address)
        worker = self._workers().get(address)
        if worker is None:
            why = self._connections.absences().get(address, "")
            raise ConfigError(f"worker {address}: is not there: {why}")
        return worker

    def _status(self, place: Place, worker: Worker | None, why: Mapping[str, str]) -> WorkerStatus:
        if worker is None:
            reason = why.get(place.address, "")
            return WorkerStatus(worker=place.address, role=place.role, status="absent", why=reason)
        return WorkerStatus(
            worker=place.address,
            role=worker.facts.role,
            status=worker_status(worker),
            drain=worker.drain,
            routed=len(worker.requests),
            others=worker.others,
            weights=worker.facts.weights,
            version=worker.facts.version,
        )
