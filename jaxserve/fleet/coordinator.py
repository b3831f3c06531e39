"""Decides which worker runs a request, and which one continues it when that worker is lost.

Pure: events in, actions out, an injected clock. `router.py` carries out the actions; the bench and
the tests run this module alone. It never sees KV pages and takes no part in any step.

The policy:
1. A prompt goes to the prefill worker that is expected to finish it first. The estimate is the
   worker's queued work plus the tokens that its prefix cache lacks, with attention's quadratic
   part, over its speed. With `prefill.long_workers` long prompts have workers of their own. The
   longer a prompt, the later it is due, so that it does not keep short ones waiting.
2. A prompt of less than a page, or with all its full pages in a domain's prefix cache, goes to a
   domain at once; so does every prompt if the fleet has no prefill workers.
3. Once its pages are held, a request goes to the domain whose KV cache has the most room for it and
   its output (xDeepServe §4.3). Counted are the tokens that the domain's requests and this one will
   take, plus the prompt tokens that the domain lacks. The domain's scheduler picks the DP group. If
   no domain has room, the pages stay held; if all prefill workers are full, new requests are
   refused. A request that waits for a slot moves to another domain that has a free slot earlier.
   With `fleet.long_domains` long sequences have domains of their own, to which others move, as in
   4, once they have grown as long: so others' steps do not last as long as their attention takes.
4. Generated tokens are logged. If a domain is lost, prompt and log are prefilled and continued
   elsewhere with the same seed, so that the tokens are those of the lost domain.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from jaxserve.config.deployment import Deployment
from jaxserve.engine.request import MAX_PRIORITY, PATIENCE, FinishReason, TokenOutput
from jaxserve.errors import DrainingError, InvalidRequestError, OverloadedError
from jaxserve.fleet.estimates import blocks_of
from jaxserve.fleet.placement import RequestPlacement
from jaxserve.fleet.request_frames import Cancel, check_unused
from jaxserve.fleet.routed import (
    Action,
    End,
    Job,
    Routed,
    SendFrame,
    SendPrefill,
    SendSubmit,
    WaitingRequests,
    Worker,
)
from jaxserve.fleet.worker_frames import (
    Adopt,
    Release,
    Renew,
    State,
    Withdraw,
    WorkerFacts,
    WorkerRole,
    packed,
)
from jaxserve.link.pages.source import PagesSource

FULL_SECONDS = 0.5
"""Pause before a worker that refused a request for want of room is asked again."""
LENGTH_CLASS = 2048
"""Prompts of this cost are due as late as those one step lower in priority; at twice the cost two
steps, and so on."""


class Coordinator:
    """Assigns the requests of one router to its workers.

    Args:
      deployment: sections `prefill`, `pages`, `fleet` and `cluster`.
      name: name of the router, with which the id of every attempt begins.
      clock: seconds, monotonic.
    """

    def __init__(self, deployment: Deployment, name: str, clock: Callable[[], float]):
        self._pages, self._fleet = deployment.pages, deployment.fleet
        self._cluster = deployment.cluster
        self._name, self._clock = name, clock
        self._numbers = itertools.count()
        self.placement = RequestPlacement(deployment, clock)
        self.requests: dict[str, Routed] = {}
        """Request id → request."""
        self._attempts: dict[str, Routed] = {}
        self._waiting = WaitingRequests()
        self._estimates = self.placement.estimates
        self.replays = 0
        """Requests that began again elsewhere because a worker was lost."""
        self.moves = 0
        """Requests that began again elsewhere: their worker drains, or they have outgrown it."""
        self.refusals = 0

    @property
    def waiting(self) -> int:
        """Requests that no worker has, or whose pages are held until a domain has room."""
        return len(self._waiting)

    # ------------------------------------------------------------------------------- workers

    def joined(self, name: str, facts: WorkerFacts, reserved: bool = False) -> list[Action]:
        """Adds a worker and sends it the waiting requests that it has room for."""
        self.placement.join(Worker(name, facts, reserved))
        return self._go_on()

    def left(self, name: str) -> list[Action]:
        """Forgets a lost worker; its requests go elsewhere."""
        worker = self.placement.leave(name)
        if worker is None:
            return []
        actions: list[Action] = []
        for request in list(worker.requests.values()):
            if request.worker is worker or request.place in ("prefill", "held"):
                actions += self._lost(request, f"{worker.facts.role} worker {name} is gone")
            else:  # the worker only held pages, and a domain has the request already
                self._attempts.pop(request.prefill_attempt, None)
                request.prefill = None
        return actions + self._go_on()

    def requests_of(self, name: str) -> list[str]:
        """Ids of the requests that a worker has."""
        worker = self.placement.workers.get(name)
        found = [] if worker is None else worker.requests.values()
        return [request.job.request_id for request in found]

    def state(self, name: str, state: State) -> list[Action]:
        """Records a worker's state and sends it the waiting requests that it has room for."""
        worker = self.placement.workers.get(name)
        if worker is None:
            return []
        worker.load, worker.others = state.load, state.others
        worker.orphans = {attempt.rpartition("@")[0]: attempt for attempt in state.orphans}
        worker.why = ""
        if state.status != "ready":
            worker.why = f"it is {state.status}"
        elif state.turn_age > self._cluster.suspect_seconds:
            worker.why = f"its step loop has stood still for {state.turn_age:.1f} s"
        else:
            worker.why = self.placement.misfit(worker)
        self.placement.drains(worker, state.drain)
        return (self._drain(worker) if worker.drain else []) + self._go_on()

    def silent(self, name: str, seconds: float) -> None:
        """Notes a worker's seconds of silence; it gets no new requests until it sends something."""
        if (worker := self.placement.workers.get(name)) is not None:
            worker.why = f"it has been silent for {seconds:.1f} s"
            self.placement.changed(worker)

    # ------------------------------------------------------------------------------ requests

    def submit(self, job: Job, emitted: Sequence[int] = ()) -> list[Action]:
        """Accepts a request, with the tokens that it has from before.

        Raises:
          InvalidRequestError: its id is in use, or its key, with other parameters.
          OverloadedError: no worker has room for it, or its targets cannot be met
            (`fleet.late: refuse`); the message shows the numbers.
        """
        orphans = [worker.orphans for worker in self.placement.of("domain")]
        check_unused(job.request_id, self.requests, itertools.chain(*orphans))
        now = self._clock()
        rank = now + PATIENCE * job.priority, next(self._numbers)
        request = Routed(job, now, rank, emitted=[*emitted], placed_at=now)
        request.blocks = blocks_of(request.tokens, job.cache_salt)
        if (orphan := self._orphan(job.request_id)) is not None:
            self.requests[job.request_id] = request
            return [self._adopt(request, *orphan)]
        try:
            competing = self._waiting.competing(self.placement.takes)
            worker = self.placement.room_for(request, competing)
        except OverloadedError:
            self.refusals += 1
            raise
        self.requests[job.request_id] = request
        if worker is None:
            self._queue(request, "waiting")
            return []
        send = self._to_prefill if worker.facts.role == "prefill" else self._to_domain
        return [send(request, worker)]

    def held(self, attempt: str, source: PagesSource) -> list[Action]:
        """Notes that a prefill worker has computed a prompt and holds its pages."""
        request = self._attempts.get(attempt)
        if request is None or request.place != "prefill" or attempt != request.prefill_attempt:
            return []
        assert request.prefill is not None
        self._estimates.computed(request.prefill, request.cost, self._clock())
        self.placement.changed(request.prefill)
        request.place, request.computed_at = "held", self._clock()
        actions: list[Action] = []
        if source.tokens:
            request.source, request.found = source, source.cached
            request.renew_at = self._clock() + self._pages.lease_seconds / 3
        else:
            request.direct = True
            actions = self._release(request)
        self._queue(request, "held")
        return actions + self._go_on()

    def rejected(self, attempt: str, error: Exception) -> list[Action]:
        """Notes that a worker refused a request or gave up its prompt."""
        request = self._attempts.get(attempt)
        if request is None:
            return []
        worker = request.worker if attempt == request.attempt else request.prefill
        if isinstance(error, InvalidRequestError):
            return self._end(request, "error", str(error))
        if worker is not None and not request.asked:
            worker.full_until = self._clock() + FULL_SECONDS
            self.placement.changed(worker)
        if not isinstance(error, OverloadedError | DrainingError):
            return self._lost(request, str(error)) + self._go_on()
        if request.place == "domain":
            self._take_from_domain(request)
            self._queue(request, "held" if request.source is not None else "waiting")
            return self._go_on()
        actions = self._release(request)
        self._queue(request, "waiting")
        return actions + self._go_on()

    def output(self, attempt: str, output: TokenOutput) -> tuple[Routed | None, list[Action]]:
        """Handles a domain's output. Returns the request to pass it on to, or None, and actions."""
        request = self._attempts.get(attempt)
        if request is None or attempt != request.attempt:
            return None, []
        reason = output.finish_reason
        if output.offset not in (None, len(request.emitted)) and not output.says_nothing:
            assert request.worker is not None
            actions: list[Action] = [SendFrame(request.worker.name, Cancel(attempt))]
            why = f"its tokens from {len(request.emitted)} to {output.offset} did not come"
            return None, actions + self._lost(request, why) + self._go_on()
        if reason is None:
            if request.last_at is None or request.prefill is not None:
                return request, self._begun(request, output)
            self._log(request, output)
            return request, []
        deadline = request.job.deadline
        late = deadline is not None and self._clock() >= deadline
        if output.pages_lost or output.engine_failed or (reason == "cancelled" and not late):
            # This router has not cancelled it: the worker fails, ends, or had no pages.
            self._log(request, output)
            return None, self._lost(request, output.error or "its worker ended it") + self._go_on()
        actions = self._begun(request, output)
        if request.worker is not None and request.emitted:
            blocks = blocks_of(request.tokens, request.job.cache_salt)
            self.placement.index.add(request.worker.name, blocks)
            self._estimates.ended(len(request.emitted))
        self._take_from_domain(request)
        return request, actions + self._forget(request) + self._go_on()

    def cancel(self, request_id: str) -> list[Action]:
        """Ends a request in whatever place it is."""
        request = self.requests.get(request_id)
        return [] if request is None else self._end(request, "cancelled") + self._go_on()

    def tick(self) -> list[Action]:
        """Ends late requests, renews leases and moves requests. Called several times a second."""
        now = self._clock()
        actions: list[Action] = []
        for request in list(self.requests.values()):
            job = request.job
            if job.deadline is not None and now >= job.deadline and request.place != "domain":
                actions += self._end(request, "cancelled", "the deadline has passed")
            elif (
                request.source is not None
                and request.prefill is not None
                and now >= request.renew_at
            ):
                request.renew_at = now + self._pages.lease_seconds / 3
                actions.append(SendFrame(request.prefill.name, Renew(request.source.hand_off)))
        for request in self._waiting:
            role: WorkerRole = "prefill" if self.placement.prefills(request) else "domain"
            seconds = self.placement.absent(role)
            why = f"no {role} worker was there"
            if role == "prefill" and not self.placement.prefilled_alike(request):
                seconds = seconds or now - request.placed_at
                why = "no prefill worker with the weights of a domain was there"
            if not seconds and not self.placement.takes(request.weights):
                seconds = now - request.placed_at
                why = f"no domain with weights {request.weights} (fleet.replay) was there"
            if seconds > self._fleet.absent_seconds:
                why += f" for {seconds:.0f} s (fleet.absent_seconds)"
                actions += self._end(request, "error", why, unavailable=True)
        for request in self.placement.outgrown(self.requests.values()):
            actions += self._leave(request)
        return actions + self._go_on() + self._move()

    # ----------------------------------------------------------------------------- movements

    def _move(self) -> list[Action]:
        """Asks domains to give back waiting requests while another has free slots."""
        actions: list[Action] = []
        for request in self.placement.stranded():
            assert request.worker is not None
            request.asked = True
            actions.append(SendFrame(request.worker.name, Withdraw(request.attempt)))
        return actions

    def _leave(self, request: Routed) -> list[Action]:
        """Makes a request leave its worker and begin again from its token log."""
        self.moves += 1
        actions: list[Action] = []
        if request.worker is not None:
            actions.append(SendFrame(request.worker.name, Cancel(request.attempt)))
        return actions + self._again(request)

    def _drain(self, worker: Worker) -> list[Action]:
        """Makes requests leave a draining worker."""
        actions: list[Action] = []
        moving = sum(bool(r.emitted) and r.place != "domain" for r in self.requests.values())
        for request in self.placement.leaving(worker, moving):
            if request.place == "domain" and request.last_at is None:
                request.asked = True
                actions.append(SendFrame(worker.name, Withdraw(request.attempt)))
                continue
            actions += self._leave(request)
        return actions

    def _orphan(self, request_id: str) -> tuple[Worker, str] | None:
        """Finds the domain that kept a request whose router is gone, and its attempt there."""
        for worker in self.placement.of("domain"):
            if attempt := worker.orphans.pop(request_id, ""):
                return worker, attempt
        return None

    def _adopt(self, request: Routed, worker: Worker, attempt: str) -> Action:
        self._attempts[attempt] = request
        self._to(request, worker, attempt)
        return SendFrame(worker.name, Adopt(attempt, packed(request.job.prompt)))

    def _place(self, request: Routed) -> Action | None:
        """Sends a request to a worker; None if no worker has room for it."""
        if self.placement.prefills(request):
            worker = self.placement.choose_prefill(request)
            return None if worker is None else self._to_prefill(request, worker)
        worker = self.placement.choose_domain(request)
        return None if worker is None else self._to_domain(request, worker)

    def _to_prefill(self, request: Routed, worker: Worker) -> Action:
        attempt = self._attempt(request)
        request.place, request.prefill, request.prefill_attempt = "prefill", worker, attempt
        request.weights = worker.facts.weights
        request.cost = self.placement.cost(request, worker)
        self._estimates.began(worker, request.cost, self._clock())
        worker.requests[attempt] = request
        self.placement.changed(worker)
        self.placement.index.add(worker.name, request.blocks)
        later = int(request.cost / LENGTH_CLASS).bit_length()
        return SendPrefill(
            worker.name, attempt, request, min(MAX_PRIORITY, request.job.priority + later)
        )

    def _to_domain(self, request: Routed, worker: Worker) -> Action:
        attempt = self._attempt(request)
        self._to(request, worker, attempt)
        return SendSubmit(worker.name, attempt, request)

    def _to(self, request: Routed, worker: Worker, attempt: str) -> None:
        """Records that a domain has a request."""
        request.place, request.worker, request.attempt = "domain", worker, attempt
        request.weights = worker.facts.weights
        request.last_at, request.asked, request.placed_at = None, False, self._clock()
        request.promised = self._estimates.promised(request)
        worker.promised += request.promised
        worker.requests[attempt] = request
        self.placement.changed(worker)
        self.placement.index.add(worker.name, request.blocks)

    def _attempt(self, request: Routed) -> str:
        """Returns an id for the next attempt, and counts how long the request waited for it."""
        if request.place in ("waiting", "held"):
            request.waited += self._clock() - request.placed_at
        attempt = f"{request.job.request_id}@{self._name}.{next(self._numbers)}"
        self._attempts[attempt] = request
        return attempt

    def _begun(self, request: Routed, output: TokenOutput) -> list[Action]:
        """Handles the first output of a request at its domain, which then has the pages."""
        self._log(request, output)
        if request.source is not None and request.prefill is not None:
            request.prefill.handed += request.source.tokens
        return self._release(request)

    def _log(self, request: Routed, output: TokenOutput) -> None:
        count = len(output.token_ids)
        if not count:
            return
        now = self._clock()
        if request.last_at is not None and request.worker is not None:
            self._estimates.paced(request.worker, (now - request.last_at) / count)
            self.placement.changed(request.worker)
        request.last_at = now
        request.emitted += output.token_ids

    def _release(self, request: Routed) -> list[Action]:
        """Gives up a request's prompt or pages at its prefill worker."""
        worker, attempt = request.prefill, request.prefill_attempt
        if worker is None:
            return []
        if request.place == "prefill":
            self._estimates.dropped(worker, request.cost)
        worker.requests.pop(attempt, None)
        self.placement.changed(worker)
        self._attempts.pop(attempt, None)
        request.prefill, request.source = None, None
        # The worker of that name may be a later start of it, which knows nothing of the attempt.
        there = self.placement.workers.get(worker.name) is worker
        return [SendFrame(worker.name, Release(attempt))] if there else []

    def _take_from_domain(self, request: Routed) -> None:
        self._attempts.pop(request.attempt, None)
        if request.worker is not None:
            request.worker.requests.pop(request.attempt, None)
            request.worker.promised -= request.promised
            self.placement.changed(request.worker)
        request.worker, request.attempt = None, ""

    def _queue(self, request: Routed, place: Literal["waiting", "held"]) -> None:
        request.place = place
        if place == "waiting" and (not request.emitted or self._fleet.replay == "any_weights"):
            request.weights = ""
        request.placed_at = self._clock()
        self._waiting.add(request)

    def _go_on(self) -> list[Action]:
        """Sends waiting requests to workers with room, in order of deadline.

        A request without room holds back the requests with the same needs, and no others.
        """
        actions: list[Action] = []
        blocked: set[str] = set()
        for request, queue in self._waiting.first():
            needs = self.placement.needs(request)
            if needs in blocked:
                continue
            action = self._place(request)
            if action is None:
                blocked.add(needs)
            else:
                queue.remove(request)
                actions.append(action)
        return actions

    def _lost(self, request: Routed, why: str) -> list[Action]:
        """Restarts a request whose worker was lost, or ends it after too many losses."""
        request.lost += 1
        self.replays += 1
        actions = self._again(request)
        if request.lost > self._fleet.attempts:
            return actions + self._end(
                request,
                "error",
                f"{why}; it has lost {request.lost} workers (fleet.attempts = "
                f"{self._fleet.attempts})",
                unavailable=True,
            )
        return actions

    def _again(self, request: Routed) -> list[Action]:
        """Begins a request again from its token log, on any worker."""
        self._waiting.remove(request)
        self._take_from_domain(request)
        actions = self._release(request)
        request.source, request.found, request.direct = None, None, False
        if request.emitted:
            request.blocks = blocks_of(request.tokens, request.job.cache_salt)
        self._queue(request, "waiting")
        return actions

    def _end(
        self,
        request: Routed,
        reason: FinishReason,
        error: str | None = None,
        unavailable: bool = False,
    ) -> list[Action]:
        actions = self._forget(request)
        return [*actions, End(request, reason, error, unavailable)]

    def _forget(self, request: Routed) -> list[Action]:
        """Ends a request here and tells the workers that have it."""
        self.requests.pop(request.job.request_id, None)
        self._waiting.remove(request)
        actions = self._release(request)
        if request.worker is not None:
            if self.placement.workers.get(request.worker.name) is request.worker:
                actions.append(SendFrame(request.worker.name, Cancel(request.attempt)))
            self._take_from_domain(request)
        return actions
