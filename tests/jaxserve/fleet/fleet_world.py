"""A fleet in simulated time: workers that do what a coordinator says when a test says so."""

from typing import Any

from jaxserve.config.load import load_deployment
from jaxserve.engine.request import TokenOutput
from jaxserve.errors import OverloadedError
from jaxserve.fleet import routed as orders
from jaxserve.fleet.coordinator import Coordinator
from jaxserve.fleet.request_frames import Cancel
from jaxserve.fleet.routed import Job, Routed
from jaxserve.fleet.worker_frames import Release, Renew, State, Withdraw, WorkerRole
from jaxserve.link.pages.source import PagesSource
from jaxserve.observe.load import EngineLoad
from tests.conftest import REPOSITORY
from tests.jaxserve.fleet.fake_worker import worker_facts

PAGE = 16


class World:
    """Workers that do what they are told when the test says so, and a clock."""

    kind: type[Coordinator] = Coordinator

    def __init__(self, **overrides: Any):
        self.now = 100.0
        values = {"mode": "colocated", "prefill.workers": 2, "domains": 2}
        values |= {"fleet.prefill": ["p0:1", "p1:1"], "fleet.domains": ["d0:1", "d1:1"]}
        values |= {key.replace("__", "."): value for key, value in overrides.items()}
        self.deployment = deployment = load_deployment(REPOSITORY, values)
        self.coordinator = self.kind(deployment, "r", lambda: self.now)
        self.prompts: dict[str, tuple[str, Routed, int]] = {}
        self.held: dict[str, str] = {}
        self.running: dict[str, tuple[str, Routed]] = {}
        self.ended: dict[str, str] = {}
        self.log: dict[str, list[int]] = {}
        self.withdrawn: set[str] = set()
        self.sent: list[Any] = []
        self.begun: dict[str, str] = {}

    @classmethod
    def of(cls, *names: str, **overrides: Any) -> "World":
        """A world in which these workers are there."""
        world = cls(**overrides)
        for name in names:
            world.join(name)
        return world

    @classmethod
    def without_prefill(cls, *names: str, **overrides: Any) -> "World":
        return cls.of(*names, prefill__workers=0, fleet__prefill=[], **overrides)

    def told(self, name: str, load: EngineLoad | None = None, **state: Any) -> None:
        """A worker says how it is; ready, unless told otherwise."""
        news = State(**{"status": "ready", "turn_age": 0.0, "load": load or EngineLoad()} | state)
        self.take(self.coordinator.state(name, news))

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.take(self.coordinator.tick())

    def join(self, name: str, reserved: bool = False, tokens: int = 16000, **options: Any) -> None:
        """A worker joins; `tokens` is the size of its cache."""
        sizes = {"page_size": PAGE, "pages": tokens // PAGE, "max_length": 10**6}
        role: WorkerRole = "prefill" if name.startswith("p") else "domain"
        self.take(self.coordinator.joined(name, worker_facts(role, **sizes, **options), reserved))

    def speeds(self, **speeds: float) -> None:
        placement = self.coordinator.placement
        for name, speed in speeds.items():
            placement.workers[name].speed = speed
            placement.changed(placement.workers[name])

    def leave(self, name: str) -> None:
        for book in (self.prompts, self.running):
            for attempt in [a for a, one in book.items() if one[0] == name]:
                del book[attempt]
        self.held = {a: worker for a, worker in self.held.items() if worker != name}
        self.take(self.coordinator.left(name))

    def submit(self, name: str, length: int, max_tokens: int = 4, **options: Any) -> None:
        first = int(name.strip("abcdefghijklmnopqrstuvwxyz") or 0) % 900
        prompt = options.pop("prompt", [first + 1] * length)
        actions = self.coordinator.submit(Job(name, prompt, max_tokens, **options))
        self.log[name] = []
        self.take(actions)

    def take(self, actions: list[Any]) -> None:
        workers = self.coordinator.placement.workers
        for action in actions:
            self.sent.append(action)
            match action:
                case orders.End(request=request, reason=reason):
                    self._end(request.job.request_id, reason)
                case orders.SendPrefill(worker=worker, attempt=attempt, request=request):
                    assert workers[worker].facts.weights == request.weights
                    length = len(request.tokens)
                    self.prompts[attempt] = worker, request, length
                case orders.SendSubmit(worker=worker, attempt=attempt, request=request):
                    assert workers[worker].facts.weights == request.weights
                    began = self.begun.setdefault(request.job.request_id, request.weights)
                    if request.emitted and self.deployment.fleet.replay == "same_weights":
                        assert request.weights == began
                    if not request.emitted:
                        self.begun[request.job.request_id] = request.weights
                    assert request.emitted == self.log[request.job.request_id]
                    if request.source is not None:
                        assert request.source.hand_off in self.held, "pages that are still held"
                        holder = self.held[request.source.hand_off]
                        assert workers[holder].facts.weights == request.weights
                        assert request.source.tokens == len(request.tokens) // PAGE * PAGE
                    self.running[attempt] = worker, request
                case orders.SendFrame(worker, Release(attempt)):
                    assert worker in workers
                    self.prompts.pop(attempt, None)
                    self.held.pop(attempt, None)
                case orders.SendFrame(worker, Cancel(attempt)):
                    assert worker in workers
                    self.running.pop(attempt, None)
                case orders.SendFrame(worker, Withdraw(attempt)):
                    assert self.running[attempt][0] == worker
                    self.withdrawn.add(attempt)
                case orders.SendFrame(_, Renew(hand_off)):
                    assert hand_off in self.held

    def computed(self, attempt: str) -> None:
        worker, _, length = self.prompts.pop(attempt)
        self.held[attempt] = worker
        source = PagesSource("a", attempt, length // PAGE * PAGE, "d")
        self.take(self.coordinator.held(attempt, source))

    def give_back(self, attempt: str) -> None:
        """A domain gives a request back that it was asked for, and that has no token there."""
        self.withdrawn.discard(attempt)
        if attempt in self.running:
            del self.running[attempt]
            self.take(self.coordinator.rejected(attempt, OverloadedError("another has a slot")))

    def emit(self, attempt: str) -> None:
        self.withdrawn.discard(attempt)
        _, request = self.running[attempt]
        name, log = request.job.request_id, self.log[request.job.request_id]
        last = len(log) + 1 == request.job.max_tokens
        if last:
            del self.running[attempt]
        news = TokenOutput(
            request_id=attempt, token_ids=[len(log)], finish_reason="length" if last else None
        )
        whose, actions = self.coordinator.output(attempt, news)
        assert whose is request
        log.append(len(log))
        if last:
            self._end(name, "length")
        self.take(actions)

    def _end(self, name: str, reason: str) -> None:
        assert name not in self.ended, "ends once"
        self.ended[name] = reason
