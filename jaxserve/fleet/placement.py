"""Chooses the best worker for a request, or refuses it, for the coordinator.

Pure, with the coordinator's clock. A router knows the last state that each worker sent, and the
requests that it has sent since. All workers of a role are a table of columns: a thousand are
compared in tens of microseconds.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.errors import OverloadedError
from jaxserve.fleet.estimates import Estimates, PrefixIndex, prompt_cost
from jaxserve.fleet.routed import Routed, Worker
from jaxserve.fleet.worker_frames import DrainMode, WorkerRole

COLUMNS = {
    "suspect": np.bool_,
    "reserved": np.bool_,
    "full_until": np.float64,
    "count": np.int64,
    "facts.slots": np.int64,
    "facts.tokens": np.int64,
    "facts.attention_cost": np.float64,
    "pace": np.float64,
    "work": np.float64,
    "speed": np.float64,
}
"""Types by attribute of a worker; a column has the last part of its name."""


class WorkerTable:
    """The workers of one role, in the order in which they came.

    Args:
      taken: tokens of a worker's cache that requests take.
      weights: number of a worker's weights.

    Attributes:
      rows: name of a worker → its row.
    """

    def __init__(self, taken: Callable[[Worker], float], weights: Callable[[Worker], int]):
        self.workers: list[Worker] = []
        self._read: dict[str, tuple[type, Callable[[Worker], Any]]]
        self._read = {"taken": (np.float64, taken), "weights": (np.int64, weights)}
        for attribute, kind in COLUMNS.items():
            self._read[attribute.rpartition(".")[2]] = kind, attrgetter(attribute)
        self._lay_out()

    def __getitem__(self, column: str) -> np.ndarray:
        """[workers] of that name."""
        return self._columns[column]

    def join(self, worker: Worker) -> None:
        """Appends a worker."""
        self.workers.append(worker)
        self._lay_out()

    def leave(self, worker: Worker) -> None:
        """Removes a worker; the others keep their order."""
        del self.workers[self.rows[worker.name]]
        self._lay_out()

    def _lay_out(self) -> None:
        """Makes the rows anew, all out of date: a thousand take a millisecond, which is little
        beside a worker's start or end."""
        count = len(self.workers)
        self.rows = {worker.name: row for row, worker in enumerate(self.workers)}
        self._columns: dict[str, np.ndarray] = {
            name: np.zeros(count, kind) for name, (kind, _) in self._read.items()
        }
        self._changed = set(self.rows)

    def changed(self, worker: Worker) -> None:
        """Notes that a worker's row is out of date."""
        if worker.name in self.rows:
            self._changed.add(worker.name)

    def usable(self, now: float) -> np.ndarray:
        """[workers]: which of them may get requests; brings all rows up to date."""
        columns = self._columns
        for name in self._changed:
            row = self.rows[name]
            worker = self.workers[row]
            for column, (_, read) in self._read.items():
                columns[column][row] = read(worker)
        self._changed.clear()
        return ~columns["suspect"] & (columns["full_until"] <= now)

    def of(self, hits: Mapping[str, int]) -> tuple[list[int], np.ndarray]:
        """Rows of the workers that are here, and what they have."""
        found = {self.rows[name]: tokens for name, tokens in hits.items() if name in self.rows}
        return [*found], np.fromiter(found.values(), np.int64, len(found))


STRANDED_SECONDS = 0.5
"""Seconds that a request waits at a domain before it may go to another one. The domain's last state
can be as old."""


class RequestPlacement:
    """Keeps the workers of one router and chooses among them.

    Args:
      deployment: sections `prefill`, `pages` and `fleet`.
      clock: seconds, monotonic.
    """

    def __init__(self, deployment: Deployment, clock: Callable[[], float]):
        self._pages, self._fleet, self._clock = deployment.pages, deployment.fleet, clock
        self._long: dict[WorkerRole, int] = {
            "prefill": deployment.prefill.long_tokens,
            "domain": deployment.fleet.long_tokens,
        }
        self.wants_prefill = bool(deployment.prefill.workers or deployment.fleet.prefill)
        self._roles: dict[WorkerRole, dict[str, Worker]] = {"prefill": {}, "domain": {}}
        self._absent: dict[WorkerRole, float | None] = dict.fromkeys(self._roles, clock())
        self._weights: dict[str, int] = {}  # digest → number
        self.workers: dict[str, Worker] = {}
        """Name → connected worker."""
        self.index = PrefixIndex()
        self.estimates = Estimates(deployment)
        self._tables: dict[WorkerRole, WorkerTable] = {
            role: WorkerTable(
                self.estimates.taken, lambda worker: self._weights[worker.facts.weights]
            )
            for role in self._roles
        }

    def join(self, worker: Worker) -> None:
        """Adds a connected worker."""
        self.leave(worker.name)
        self._weights.setdefault(worker.facts.weights, len(self._weights))
        self.workers[worker.name] = self._roles[worker.facts.role][worker.name] = worker
        self._tables[worker.facts.role].join(worker)
        self.index.join(worker.name, worker.facts.tokens)
        self._note_absence(worker.facts.role)

    def leave(self, name: str) -> Worker | None:
        """Forgets a worker; returns it, or None if it was not known."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return None
        self.index.leave(name)
        del self._roles[worker.facts.role][name]
        self._tables[worker.facts.role].leave(worker)
        self._note_absence(worker.facts.role)
        return worker

    def drains(self, worker: Worker, mode: DrainMode) -> None:
        """Notes that a worker drains, or accepts requests again."""
        worker.drain = mode
        self.changed(worker)
        self._note_absence(worker.facts.role)

    def changed(self, worker: Worker) -> None:
        """Notes a change of a worker in anything but its name and facts."""
        self._tables[worker.facts.role].changed(worker)

    def of(self, role: WorkerRole) -> list[Worker]:
        """Returns the workers of a role."""
        return list(self._roles[role].values())

    def absent(self, role: WorkerRole) -> float:
        """Seconds for which no worker of a role has accepted requests; 0 while one does."""
        since = self._absent[role]
        return 0.0 if since is None else self._clock() - since

    def takes(self, weights: str) -> bool:
        """Returns whether a domain with these weights (empty: any) accepts requests."""
        domains = self._roles["domain"].values()
        return any(not d.drain and weights in ("", d.facts.weights) for d in domains)

    def misfit(self, worker: Worker) -> str:
        """Says why no domain could use the results of a prefill worker: all connected domains have
        other weights. Empty if one has the same, or none is connected."""
        if worker.facts.role != "prefill" or len(self._weights) < 2:
            return ""
        others = {d.facts.weights: d.facts.version for d in self._roles["domain"].values()}
        if not others or worker.facts.weights in others:
            return ""
        theirs = ", ".join(f"{weights} (version {v})" for weights, v in sorted(others.items()))
        return (
            f"its weights are {worker.facts.weights} (version {worker.facts.version}), those of "
            f"the domains {theirs}: none could go on with what it computes"
        )

    def prefills(self, request: Routed) -> bool:
        """Returns whether a prefill worker, rather than a domain, should compute the prompt."""
        if not self.wants_prefill or request.source is not None:
            return False
        if request.direct or request.job.whole:
            return False
        prefills = self._roles["prefill"]
        if self._absent["prefill"] is not None or not self.prefilled_alike(request):
            bound = self._pages.recompute_tokens
            return self._pages.on_failure == "fail" or bool(bound and request.length > bound)
        page = next(iter(prefills.values())).facts.page_size
        if request.length <= page:
            return False
        hits = self.index.hits(request.blocks)
        reserved = self._is_long(request, "domain")
        alike = (w.name for w in self._roles["domain"].values() if w.reserved == reserved)
        return request.length - max((hits.get(name, 0) for name in alike), default=0) > page

    def prefilled_alike(self, request: Routed) -> bool:
        """Returns whether a prefill worker could compute for a request: it has the request's
        weights or, if the request may run on any, those of some domain that accepts requests."""
        if len(self._weights) < 2:
            return True
        prefills = {w.facts.weights for w in self._roles["prefill"].values() if not w.drain}
        if request.weights:
            return request.weights in prefills
        domains = {w.facts.weights for w in self._usable("domain")}
        return not domains or not prefills.isdisjoint(domains)

    def needs(self, request: Routed) -> str:
        """Names the kind of room and the weights that a request needs. If one request finds no
        room, no other with the same needs does."""
        role: WorkerRole = "prefill" if self.prefills(request) else "domain"
        return f"{role} {self._is_long(request, role)} {request.weights}"

    def cost(self, request: Routed, worker: Worker) -> float:
        """Returns the cost of a request's prompt for a prefill worker, in tokens."""
        known = min(self.index.hits(request.blocks).get(worker.name, 0), request.length - 1)
        return float(prompt_cost(request.length, known, worker.facts.attention_cost))

    def choose_prefill(self, request: Routed) -> Worker | None:
        """Returns the worker expected to finish the prompt first; None if none has room."""
        table, usable = self._possible(request, "prefill")
        usable &= table["count"] < self._fleet.prefill_waiting + self._pages.held
        if not usable.any():
            return None
        rows, found = table.of(self.index.hits(request.blocks))
        known = np.zeros(len(usable), np.int64)
        known[rows] = np.minimum(found, request.length - 1)
        costs = prompt_cost(request.length, known, table["attention_cost"])
        seconds = self.estimates.seconds(table["speed"], table["work"] + costs)
        return table.workers[int(np.where(usable, seconds, np.inf).argmin())]

    def choose_domain(self, request: Routed) -> Worker | None:
        """Returns the domain with the most room for the request; None if none has any.

        Domains with a free slot are preferred, then those that meet the target time per output
        token.
        """
        table, usable = self._possible(request, "domain")
        count, slots = table["count"], table["slots"]
        usable &= count < slots + self._fleet.domain_waiting
        if not usable.any():
            return None
        if request.source is not None:
            reached = usable & [w.reaches(request.source.address) for w in table.workers]
            usable = reached if reached.any() else usable
        rows, known = table.of(self.index.hits(request.blocks))
        lacking = np.full(len(usable), request.length)
        lacking[rows] -= known
        full = count >= slots
        target = self._fleet.tpot_seconds
        late = (table["pace"] > target) & (count > 0) & bool(target)
        worse = 2 * full + late
        taken = table["taken"] + self.estimates.promised(request) + lacking
        alike = usable & (worse == worse[usable].min())
        return table.workers[int(np.where(alike, taken / table["tokens"], np.inf).argmin())]

    def stranded(self) -> list[Routed]:
        """Returns requests that wait at a domain while others of its kind, reserved or not, have
        free slots: in order of deadline, and at most as many as there are free slots."""
        idle = (worker for worker in self._usable("domain") if not worker.load.waiting)
        free, found = _free(idle, attrgetter("reserved")), list[Routed]()
        for worker in self._roles["domain"].values():
            waiting = max(worker.count - worker.facts.slots, worker.load.waiting)
            if not free[worker.reserved] or waiting <= 0:
                continue
            silent = [request for request in worker.requests.values() if request.last_at is None]
            for request in sorted(silent, key=attrgetter("rank"))[-waiting:]:
                if request.asked:
                    free[worker.reserved] -= 1
                elif self._clock() - request.placed_at >= STRANDED_SECONDS:
                    found.append(request)
        return _first(found, free, attrgetter("worker.reserved"))

    def outgrown(self, requests: Iterable[Routed]) -> list[Routed]:
        """Returns requests that have grown too long for their domain, in order of deadline: no more
        than domains for long ones have free slots, less those on their way there."""
        bound = self._long["domain"]
        long = [one for one in requests if bound and one.length >= bound]
        reserved = (worker for worker in self._usable("domain") if worker.reserved)
        free = _free(reserved, attrgetter("facts.weights"))
        free.subtract(one.weights for one in long if one.place != "domain")
        here = [one for one in long if one.worker and not one.worker.reserved]
        begun = [one for one in here if one.last_at is not None]
        return _first(begun, free, attrgetter("weights"))

    def leaving(self, worker: Worker, moving: int) -> list[Routed]:
        """Returns the requests that should leave a draining worker: those without a token there
        and, if all are to move, as many others as other workers have room for.

        Args:
          moving: requests with tokens that are already on their way.
        """
        requests = sorted(worker.requests.values(), key=lambda request: request.rank)
        if worker.facts.role == "prefill":
            move = worker.drain == "move" and self._absent["prefill"] is None
            return [one for one in requests if move and one.place == "prefill"]
        others = [other for other in self._usable("domain") if other is not worker]
        others = [other for other in others if other.reserved == worker.reserved] or others
        found = [one for one in requests if one.last_at is None and not one.asked]
        if worker.drain != "move":
            return found
        free = _free(others, attrgetter("facts.weights"))
        anywhere = self._fleet.replay == "any_weights"
        room = free.total() if anywhere else free[worker.facts.weights]
        begun = [one for one in requests if one.last_at is not None]
        return found + begun[: max(0, room - moving)]

    def room_for(self, request: Routed, waiting: int) -> Worker | None:
        """Returns the worker for a new request; None: it waits, like `waiting` others.

        Raises:
          OverloadedError: too many wait; the message shows the numbers.
        """
        fleet = self._fleet
        role: WorkerRole = "prefill" if self.prefills(request) else "domain"
        alike = role == "domain" or self.prefilled_alike(request)
        if self._absent[role] is not None or not alike:
            if waiting >= fleet.prefill_waiting:
                raise OverloadedError(f"{waiting} requests wait for a {role} worker to be there")
            return None
        choose = self.choose_prefill if role == "prefill" else self.choose_domain
        worker = choose(request)
        if worker is None and role == "domain" and waiting < fleet.prefill_waiting:
            return None  # it holds no pages anywhere
        if worker is None or waiting >= fleet.prefill_waiting:
            workers = self._roles[role].values()
            what = "prompts computed or held" if role == "prefill" else "requests running"
            raise OverloadedError(
                f"no room: {sum(w.count for w in workers)} {what} or waiting at {len(workers)} "
                f"{role} workers, {waiting} waiting for one of them"
            )
        if fleet.late == "refuse":
            prefill = worker if role == "prefill" else None
            cost = 0.0 if prefill is None else self.cost(request, prefill)
            self.estimates.check(prefill, cost, list(self._usable("domain")))
        return worker

    def _note_absence(self, role: WorkerRole) -> None:
        if any(not worker.drain for worker in self._roles[role].values()):
            self._absent[role] = None
        elif self._absent[role] is None:
            self._absent[role] = self._clock()

    def _possible(self, request: Routed, role: WorkerRole) -> tuple[WorkerTable, np.ndarray]:
        """Returns a role's workers, and [workers], true for those that may get a request: they have
        its weights, and are reserved for long requests if it is one, unless none such is there."""
        table = self._tables[role]
        usable = table.usable(self._clock()) & self._fits(request, table)
        if self._long[role]:
            alike = usable & (table["reserved"] == self._is_long(request, role))
            usable = alike if alike.any() else usable
        return table, usable

    def _fits(self, request: Routed, table: WorkerTable) -> np.ndarray | bool:
        """Returns [workers], true for workers of an up-to-date table whose weights the request may
        run on: its own, or, if it may run on any, those of a domain that accepts requests."""
        if len(self._weights) < 2:
            return True
        if request.weights:
            return table["weights"] == self._weights.get(request.weights, -1)
        domains = self._tables["domain"]
        takes = domains.usable(self._clock())
        if table is domains or not takes.any():
            return True
        return np.isin(table["weights"], domains["weights"][takes])

    def _is_long(self, request: Routed, role: WorkerRole) -> bool:
        """Returns whether workers of a role that are reserved for long requests should have this
        one: by the tokens that a prefill worker would compute, or all that a domain attends to."""
        bound, known = self._long[role], 0
        if not bound or request.length < bound:
            return False
        if role == "prefill":
            hits = self.index.hits(request.blocks)
            known = max((hits.get(name, 0) for name in self._roles[role]), default=0)
        return request.length - known >= bound

    def _usable(self, role: WorkerRole) -> Iterator[Worker]:
        now = self._clock()
        for worker in self._roles[role].values():
            if not worker.suspect and worker.full_until <= now:
                yield worker


def _free[K](domains: Iterable[Worker], key: Callable[[Worker], K]) -> Counter[K]:
    """Counts free slots by a property of their domain."""
    free: Counter[K] = Counter()
    for domain in domains:
        free[key(domain)] += max(0, domain.facts.slots - domain.count)
    return free


def _first[K](found: list[Routed], free: Counter[K], key: Callable[[Routed], K]) -> list[Routed]:
    """Returns requests in order of deadline, as long as there are free slots of their key."""
    chosen: list[Routed] = []
    for request in sorted(found, key=attrgetter("rank")):
        if free[key(request)] > 0:
            free[key(request)] -= 1
            chosen.append(request)
    return chosen
