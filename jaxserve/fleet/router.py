"""Presents a fleet to the network faces as one engine; every request runs on some worker.

`RouterEngine` is a `TokenEngine`, so gRPC, HTTP, the status page and the metrics work for a fleet
as for a single engine. It carries out the decisions of `coordinator.py` over the connections of
`worker_connections.py`. It has no JAX, no model and no state outside this process.
"""

import logging
import math
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.engine.request import RequestChecks, RequestLimits, SamplingParams, TokenOutput
from jaxserve.errors import DrainingError, EngineFailedError
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.coordinator import Coordinator
from jaxserve.fleet.fleet_load import fleet_load
from jaxserve.fleet.registry import Place, Registry
from jaxserve.fleet.request_frames import (
    NO_GRAMMAR,
    Frame,
    GrammarOf,
    Outputs,
    has_key,
    seed_of_key,
    without_grammar,
)
from jaxserve.fleet.rolling import Rolling
from jaxserve.fleet.routed import (
    Action,
    End,
    Job,
    Routed,
    Send,
    SendFrame,
    SendPrefill,
    SendSubmit,
    Worker,
)
from jaxserve.fleet.stand_ins import StandIns
from jaxserve.fleet.worker_connections import WorkerConnection, WorkerConnections
from jaxserve.observe.load import EngineLoad
from jaxserve.observe.view import PipelineView

MOST_NAMED = 32
"""Most requests that a line of the log names."""
RUNNING_SECONDS = 2.0
"""A router that finds a domain within this time has joined a fleet that already runs."""
PREFILL_SECONDS, START_SECONDS = 5.0, 120.0
"""Seconds that a router with a domain waits for its first prefill worker, though the domain could
do without one: in a running fleet, and in one that starts."""
CLOSE_SECONDS = 2.0
"""Seconds to wait for cancelled requests at the end."""

logger = logging.getLogger(__name__)

OnOutput = Callable[[TokenOutput], None]


class _Open(msgspec.Struct):
    """Request in the form that its client sent, and the receiver of its tokens."""

    params: SamplingParams
    grammar: GrammarOf
    on_output: OnOutput
    cached: int | None = None
    queued: float = 0.0
    scored: bool = False
    """True once the log-probabilities of its prompt have been passed on."""


class RouterEngine:
    """One replica of the router. Any thread may call it.

    Args:
      deployment: deployment of the fleet.
      token: secret that the workers know.
      model: digest of the model's config.json; workers of another model are refused.
    """

    failure: EngineFailedError | None = None
    """Always None: only a router's workers fail."""
    connection: ClassVar = WorkerConnection
    coordinator: ClassVar = Coordinator

    def __init__(self, deployment: Deployment, token: str, model: str):
        self.name = secrets.token_hex(4)
        self._registry = Registry(deployment.fleet, deployment.prefill)
        self._coordinator = self.coordinator(deployment, self.name, time.monotonic)
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._cancelled: deque[str] = deque()
        self._checks: RequestChecks | None = None
        self._info: dict[str, Any] = {}
        self._view = PipelineView()
        self._status = "ready"
        self._idle = threading.Condition(self._lock)
        self._there = threading.Event()
        self._recomputes = deployment.pages.on_failure == "recompute"
        self._started = time.monotonic()
        self._alone_at = math.inf  # when domains serve without a first prefill worker
        self.connections = WorkerConnections(
            self._registry.places,
            token,
            frames.hello_of(f"router {self.name}", model),
            self,
            kind=self.connection,
            suspect=deployment.cluster.suspect_seconds,
            silent=deployment.cluster.heartbeat_seconds,
            stuck=deployment.cluster.step_seconds + deployment.cluster.heartbeat_seconds,
        )
        self._stand_ins = StandIns(deployment, time.monotonic)
        self.rolling = Rolling(self._registry, self.connections, self._workers, self._stand_ins)
        """Changes of the fleet, for operators."""

    def start(self) -> None:
        """Begins to connect to workers."""
        self._started = time.monotonic()
        self.connections.start()

    def wait(self, seconds: float) -> bool:
        """Waits for a domain, and for a prefill worker if the fleet has any; returns False after
        `seconds`. If domains compute prompts without prefill workers (`pages.on_failure`), a
        missing one delays it only by `PREFILL_SECONDS` or `START_SECONDS`."""
        return self._there.wait(seconds)

    # -------------------------------------------------------------------------- `TokenEngine`

    @property
    def status(self) -> str:
        """ "ready" while there is a domain; "starting", "draining" or "closed"."""
        if self._status == "ready" and not self._coordinator.placement.of("domain"):
            return "starting"
        return self._status

    @property
    def last_turn(self) -> float:
        """Seconds of `time.monotonic` at which the connections' thread last went round."""
        return self.connections.last_turn

    def load(self) -> EngineLoad:
        """Load of all workers, by their last states."""
        with self._lock:
            connections = self.connections
            return fleet_load(
                self._coordinator,
                self._registry.places(),
                connections.absences(),
                connections.losses,
            )

    def pipeline(self) -> PipelineView:
        """Asks the first domain for a view; returns the one that the previous call asked for."""
        with self._lock:
            first = next(iter(self._coordinator.placement.of("domain")), None)
        if first is not None:
            self.connections.send(first.name, frames.AskPipeline())
        return self._view

    def reset_prefix_cache(self) -> None:
        """Tells every worker to empty its prefix caches, without waiting for it."""
        for address in self._workers():
            self.connections.send(address, frames.Reset())

    def whereabouts(self) -> dict[str, tuple[str, str]]:
        """Returns `Routed.place` of every open request and the address of its worker, by id."""
        with self._lock:
            return {
                name: (one.place, getattr(one.worker or one.prefill, "name", ""))
                for name, one in self._coordinator.requests.items()
            }

    def model_info(self) -> Mapping[str, Any]:
        """See `TokenEngine`."""
        return self._info

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        """Never called: a router outlives its workers."""

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: OnOutput,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        source: None = None,
        emitted: Sequence[int] = (),
    ) -> str:
        """Takes a request; `on_output` is called on the connections' thread.

        Args:
          source: None; a router takes no pages.
          emitted: tokens that the request has from before.

        Raises:
          InvalidRequestError: a field is out of range.
          OverloadedError: no worker has room, or a target cannot be met.
          DrainingError: nothing new is taken.
        """
        if self._checks is None or self._status != "ready":
            raise DrainingError(f"the router is {self.status} and takes no requests")
        request_id = request_id or uuid.uuid4().hex
        request = self._checks.request(prompt, params, request_id, deadline, emitted)
        sent, grammar = without_grammar(params)
        if sent.seed is None:  # the same at every worker that may run it
            seed = seed_of_key(request_id) if has_key(request_id) else request.seed
            sent = msgspec.structs.replace(sent, seed=seed)
        job = Job(
            request_id,
            request.prompt,
            self._checks.limits.max_generated(request),
            params.cache_salt,
            params.priority,
            deadline,
            params.prompt_logprobs is not None,
        )
        with self._lock:
            actions = self._coordinator.submit(job, request.emitted)
            self._open[request_id] = _Open(sent, grammar, on_output)
            self._send(actions)
        return request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request, wherever it runs; its last output follows."""
        self._cancelled.append(request_id)
        self.connections.wake()

    def drain(self, timeout: float) -> bool:
        """Accepts no more requests and waits for the open ones; False if `timeout` came first."""
        with self._idle:
            self._status = "draining"
            return self._idle.wait_for(lambda: not self._open, timeout)

    def close(self) -> None:
        """Ends all open requests as cancelled, and all connections."""
        self._status = "closed"
        for request_id in list(self._open):
            self.cancel(request_id)
        with self._idle:
            self._idle.wait_for(lambda: not self._open, CLOSE_SECONDS)
        self._registry.close()
        self.connections.close()

    # ---------------------------------------------- events of connections, on their thread

    def joined(self, place: Place, facts: frames.WorkerFacts) -> None:
        """Takes a worker that is connected and ready."""
        with self._lock:
            ended = self._send(self._coordinator.joined(place.address, facts, place.reserved))
            self._note_limits()
        self._deliver(ended)

    def left(self, place: Place, why: str) -> None:
        """Takes the loss of a worker."""
        with self._lock:
            before = self._coordinator.replays
            affected = self._coordinator.requests_of(place.address)
            ended = self._send(self._coordinator.left(place.address))
            replays = self._coordinator.replays - before
            self._note_limits()
        if replays:
            logger.warning(
                "%d requests of %s go on elsewhere: %s", *(replays, place.address, _named(affected))
            )
        self._deliver(ended)

    def turn(self) -> None:
        """Called in every round of the connections' thread, and soon after `wake`."""
        if time.monotonic() > self._alone_at and not self._there.is_set():
            logger.warning("no prefill worker is there: domains compute prompts themselves")
            self._there.set()
        while self._cancelled:
            with self._lock:
                ended = self._send(self._coordinator.cancel(self._cancelled.popleft()))
            self._deliver(ended)

    def tick(self) -> None:
        """Called every `worker_connections.TICK_SECONDS`."""
        with self._lock:
            ended = self._send(self._coordinator.tick())
            workers = self._coordinator.placement.workers
            orders = self._stand_ins.decide(self._registry.places(), workers)
        for worker, domain, why, hurry in orders:
            role = "a domain" if domain else "a prefill worker"
            logger.warning("worker %s is to become %s: %s", worker, role, why)
            self.connections.send(worker, frames.Become(domain, why, hurry))
        self._deliver(ended)

    def received(self, place: Place, frame: Any) -> None:
        """Takes a frame of a connected worker."""
        coordinator = self._coordinator
        if place.address not in coordinator.placement.workers:
            return
        if isinstance(frame, Outputs):
            self._outputs(frame.outputs)
            return
        actions: list[Action] = []
        with self._lock:
            match frame:
                case frames.State():
                    worker = coordinator.placement.workers[place.address]
                    before = worker.why
                    actions = coordinator.state(place.address, frame)
                    if frame.becomes:
                        self._stand_ins.changes(worker)
                    self._say(place, before, worker.why)
                case frames.Held(request_id=attempt, source=source) if source is not None:
                    actions = coordinator.held(attempt, source)
                case frames.Held(request_id=attempt, refusal=refusal) if refusal is not None:
                    actions = coordinator.rejected(attempt, refusal.error())
                case frames.Rejected(request_id=attempt, refusal=refusal):
                    actions = coordinator.rejected(attempt, refusal.error())
                case frames.Pipeline(view=view):
                    self._view = view
                case frames.Rebalanced():
                    self.rolling.rebalanced(place.address, frame)
            ended = self._send(actions)
        self._deliver(ended)

    def _workers(self) -> Mapping[str, Worker]:
        with self._lock:
            return dict(self._coordinator.placement.workers)

    def silent(self, place: Place, seconds: float) -> None:
        """Called repeatedly while a connected worker stays silent, with the seconds of silence."""
        with self._lock:
            worker = self._coordinator.placement.workers.get(place.address)
            if worker is not None:
                before = worker.why
                self._coordinator.silent(place.address, seconds)
                self._say(place, before, worker.why)

    def _say(self, place: Place, before: str, now: str) -> None:
        """Logs that a worker becomes suspect, with its requests, or that it no longer is."""
        if now and not before:
            requests = _named(self._coordinator.requests_of(place.address))
            logger.warning(
                "%s worker %s is suspect: %s; its requests: %s",
                *(place.role, place.address, now, requests),
            )
        elif before and not now:
            logger.info("%s worker %s is well again", place.role, place.address)

    def _outputs(self, outputs: list[TokenOutput]) -> None:
        """Logs tokens and passes them on to their requests."""
        news: list[tuple[OnOutput, TokenOutput]] = []
        with self._lock:
            for output in outputs:
                request, actions = self._coordinator.output(output.request_id, output)
                if request is not None:
                    self._pass_on(request, output, news)
                if actions:
                    news += self._send(actions)
        self._deliver(news)

    def _pass_on(
        self, request: Routed, output: TokenOutput, news: list[tuple[OnOutput, TokenOutput]]
    ) -> None:
        request_id = request.job.request_id
        entry = self._open.get(request_id)
        if entry is None:
            return
        if entry.cached is None:
            entry.cached = request.cached(output)
            entry.queued = request.queued(output)
        if output.prompt_logprobs is not None:
            entry.scored = True
        change = msgspec.structs.force_setattr  # the decoder made it: no other has it
        change(output, "request_id", request_id)
        change(output, "cached_tokens", entry.cached)
        change(output, "queue_seconds", entry.queued)
        if output.finish_reason is not None:
            self._ended(request_id)
        news.append((entry.on_output, output))

    def _ended(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        if not self._open:
            self._idle.notify_all()

    def _send(self, actions: list[Action]) -> list[tuple[OnOutput, TokenOutput]]:
        """Carries actions out; returns the last outputs of requests that end here."""
        ended: list[tuple[OnOutput, TokenOutput]] = []
        for action in actions:
            if isinstance(action, End):
                request_id = action.request.job.request_id
                entry = self._open.get(request_id)
                if entry is not None:
                    self._ended(request_id)
                    last = TokenOutput(
                        request_id=request_id,
                        finish_reason=action.reason,
                        error=action.error,
                        unavailable=action.unavailable,
                    )
                    ended.append((entry.on_output, last))
                continue
            self.connections.send(action.worker, self._frame(action))
        return ended

    def _frame(self, action: Send) -> Frame:
        if isinstance(action, SendFrame):
            return action.frame
        entry = self._open.get(action.request.job.request_id)
        params = SamplingParams() if entry is None else entry.params
        match action:
            case SendPrefill(attempt=attempt, request=request, priority=priority):
                return frames.Prefill(
                    attempt,
                    frames.packed(request.tokens),
                    request.job.cache_salt,
                    priority,
                    _seconds(request.job.deadline),
                    params.trace,
                )
            case SendSubmit(attempt=attempt, request=request):
                if entry is not None and entry.scored:
                    params = msgspec.structs.replace(params, prompt_logprobs=None)
                return frames.Submit(
                    attempt,
                    frames.packed(request.job.prompt),
                    params,
                    NO_GRAMMAR if entry is None else entry.grammar,
                    _seconds(request.job.deadline),
                    frames.packed(request.emitted) if request.emitted else b"",
                    request.source,
                    has_key(request.job.request_id),
                )

    def _deliver(self, news: list[tuple[OnOutput, TokenOutput]]) -> None:
        for on_output, output in news:
            try:
                on_output(output)
            except Exception:
                logger.exception("request %s: its receiver failed", output.request_id)
                self.cancel(output.request_id)

    def _note_limits(self) -> None:
        """Sets the limits of requests to what every domain and every prefill worker can run."""
        placement = self._coordinator.placement
        domains, prefills = placement.of("domain"), placement.of("prefill")
        if not domains:
            return
        everyone = [worker.facts for worker in (*domains, *prefills)]
        first = domains[0].facts
        smallest = min(everyone, key=lambda facts: facts.pages * facts.page_size)
        longest = min(facts.max_length for facts in everyone)
        limits = RequestLimits(
            max_length=longest, pages=smallest.pages, page_size=smallest.page_size
        )
        self._checks = RequestChecks(limits, first.vocab, frozenset(first.eos_token_ids))
        if not self._info:
            self._info = {**first.info, "max_length": longest}
        if not placement.absent("prefill") or not placement.wants_prefill:
            self._there.set()
        elif self._recomputes and self._alone_at == math.inf:
            now = time.monotonic()
            runs = now - self._started < RUNNING_SECONDS
            self._alone_at = now + (PREFILL_SECONDS if runs else START_SECONDS)


def _seconds(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _named(requests: Sequence[str]) -> str:
    more = ", …" if len(requests) > MOST_NAMED else ""
    return (", ".join(sorted(requests)[:MOST_NAMED]) or "none") + more
