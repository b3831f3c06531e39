"""A worker's end of the connections to its routers: requests in, outputs out.

`WorkerPort` stands in the place of the network faces (`server/faces.py`) where `serve` runs a
prefill worker or a domain of a fleet. Each router has a session, and gets the outputs of its own
requests, numbered by their tokens. The engine's thread only queues them; the session's second
thread sends those of a step together. The requests of a router that is gone, or reads nothing, are
cancelled and their pages released.
"""

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from jaxserve.engine.request import TokenOutput
from jaxserve.errors import DrainingError, InvalidRequestError, JaxserveError, OverloadedError
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.kept_requests import KeptRequests
from jaxserve.fleet.request_frames import KNOWN, Cancel, Frame, GrammarOf, Outputs, SentError
from jaxserve.link.pages.source import PagesSource
from jaxserve.link.session.channel import Channel, Deadlines
from jaxserve.link.session.hello import Hello, Refusal
from jaxserve.link.session.listener import Listener, address_of, listen
from jaxserve.link.session.messages import Join
from jaxserve.link.session.working import WorkingSession

if TYPE_CHECKING:  # a router's faces have another engine
    from jaxserve.engine.engine import Engine

MOST_ROUTERS = 256
AGREED_SECONDS = 15.0
"""Validity of a router's word that it can do without a stand-in; it repeats that every ten seconds
(`stand_ins.py`). A stand-in stays one for at least this long: some routers may not have found it
yet."""
STATE_SECONDS = 0.5
DEADLINES = Deadlines(down=20.0)
"""A router that says nothing for `down` seconds is gone: it sends an echo every five seconds."""
BUSY = 64
"""After sending more outputs than this at once, a session waits to gather more."""
GATHER_SECONDS = 0.002
MAX_WAITING = 2**20
"""Outputs that may wait for a router before it is taken for stuck."""

logger = logging.getLogger(__name__)

OnHeld = Callable[[PagesSource | JaxserveError], None]


class WorkerPort:
    """Listens for routers.

    Args:
      address: host:port; port 0 takes a free one.
      token: Secret of the deployment.
      hello: Introduction of the worker (`worker_frames.hello_of`); a router's must fit it.
      facts: Describes the worker, given its engine.
      restore: Builds a grammar from its serialised form; slow.
      resume_seconds: Time for which requests with keys outlive their router.
      on_become: Starts this worker again in the other role. None: it cannot.
      tracing: Makes the spans of requests with a trace (`server.tracing.Tracing`). None: no spans.

    Attributes:
      address: Address on which it listens.

    Raises:
      ConfigError: the address cannot be listened on, or needs a token.
    """

    def __init__(
        self,
        address: str,
        token: str,
        hello: Hello,
        facts: "Callable[[Engine], frames.WorkerFacts]",
        restore: Callable[[GrammarOf, int], Any],
        resume_seconds: float = 0.0,
        on_become: Callable[[frames.Become], None] | None = None,
        *,
        tracing: Any = None,
    ):
        self.on_become, self.hello, self.tracing = on_become, hello, tracing
        self._make_facts, self._restore = facts, restore
        self._socket = listen(address, token)
        self.address = address_of(self._socket)
        self._listener = Listener(
            "routers",
            token,
            lambda channel: self._connection(channel).live(),
            most=MOST_ROUTERS,
            seconds=DEADLINES.handshake,
            frame_bytes=frames.WORKER_FRAME_BYTES,
        )
        self.engine: Engine | None = None
        self.facts: frames.WorkerFacts | None = None
        self.draining = False
        """True once the worker ends."""
        self.drain: frames.DrainMode = ""
        """Drain that an operator asked for; see `frames.Drain`."""
        self.becoming = False
        """True once the worker ends to start again in its other role."""
        self.kept = KeptRequests(resume_seconds, self._cancel)
        self._stopping = threading.Event()
        self._routers: set[RouterConnection] = set()  # any thread changes it, and copies it
        self._opened = math.inf
        self.compiling = ThreadPoolExecutor(1, "grammars")

    def start(self) -> dict[str, str]:
        """Listens; routers are refused until `open`. Returns {"worker": address}."""
        return {"worker": self._listener.start(self._socket)}

    def open(self, engine: "Engine") -> None:
        """Takes requests from now on."""
        self.facts = self._make_facts(engine)
        self.engine, self._opened = engine, time.monotonic()
        engine.add_failure_callback(lambda _failure: self._send_state())
        threading.Thread(target=self._tick, name="worker-state", daemon=True).start()

    def refuse(self) -> None:
        """Refuses new requests, and tells all routers; running ones go on."""
        self.draining = True
        self._send_state()

    def drains(self, mode: frames.DrainMode) -> None:
        """Refuses new requests while the mode is not empty, and tells all routers."""
        if mode != self.drain:
            logger.info("drain: %s", mode or "no more")
        self.drain = mode
        self._send_state()

    def becomes(self, order: frames.Become) -> None:
        """Starts again in another role; its requests go elsewhere first.

        One router that lacks domains makes it one. It goes back only when every router can do
        without it: routers that see different workers would have it start again and again.
        """
        latest = time.monotonic() - AGREED_SECONDS
        spared = self._opened < latest and all(r.spared > latest for r in list(self._routers))
        if self.on_become is not None and (order.domain or spared):
            self.becoming = True
            self.drains("move")
            self.on_become(order)

    def stop(self, grace: float) -> None:
        """Ends all connections, once their last outputs are sent or `grace` seconds are over."""
        self.refuse()
        deadline = time.monotonic() + grace
        self.flush(grace)
        self._stopping.set()
        self._listener.close(max(0.0, deadline - time.monotonic()))
        self.compiling.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()

    def flush(self, seconds: float) -> None:
        """Waits until everything queued for routers is sent, or the seconds are over."""
        deadline = time.monotonic() + seconds
        for router in list(self._routers):
            router.flush(max(0.0, deadline - time.monotonic()))

    def restored(self, grammar: GrammarOf) -> Any:
        """Returns a grammar in its first state, or None."""
        assert self.facts is not None
        return self._restore(grammar, self.facts.vocab) if grammar.serialised else None

    def state(self, others: int) -> frames.State:
        """Returns the engine's state for one router. `others`: requests of other routers."""
        engine = self.engine
        assert engine is not None
        failure = None if engine.failure is None else str(engine.failure)
        drain = self.drain or ("finish" if self.draining else "")
        status = "draining" if drain and engine.status == "ready" else engine.status
        age = time.monotonic() - engine.last_turn
        known = self.kept.orphans, self.becoming
        return frames.State(status, age, engine.load(), failure, others, drain, *known)

    def joined(self, router: "RouterConnection") -> None:
        """Notes a connection, and tells its router the state."""
        self._routers.add(router)
        self._send_state()

    def left(self, router: "RouterConnection") -> None:
        """Forgets a connection."""
        self._routers.discard(router)

    def _connection(self, channel: Channel) -> "RouterConnection":
        return RouterConnection(self, channel)

    def _cancel(self, request_id: str) -> None:
        if self.engine is not None:
            self.engine.cancel(request_id)

    def _tick(self) -> None:
        while not self._stopping.wait(STATE_SECONDS):
            try:
                self.kept.tick()
                self._send_state()
            except Exception:  # routers would take the worker for dead without its states
                logger.exception("the worker's state")

    def _send_state(self) -> None:
        if self.engine is not None:
            counts = {router: router.count for router in list(self._routers)}
            everyone = sum(counts.values())
            for router, own in counts.items():
                router.post(self.state(everyone - own))


Item = TokenOutput | Frame | threading.Event
"""A connection sends items in order; it sets an event once everything before it is sent."""


class RouterConnection(WorkingSession[Item]):
    """One router's requests, and the way of their outputs to it."""

    greeting = Join

    def __init__(self, port: WorkerPort, channel: Channel):
        super().__init__("routers", channel, port.hello, DEADLINES)
        self._port = port
        self._engine: Engine
        # Ids. Other threads change them, too: copy before iterating.
        self._submitted: dict[str, int] = {}  # id → tokens so far
        self._restoring: set[str] = set()  # still wanted, but their grammars are not there yet
        self._prefills: dict[str, None] = {}  # ids; until released
        self._withdrawn: set[str] = set()  # ids that may go elsewhere, without a token so far
        self._spans: dict[str, tuple[Any, int]] = {}
        """Id of a traced request → its spans, and the tokens of its prompt."""
        self.post: Callable[[Item], None] = self._noted if port.tracing else self._wanted.put
        """Queues an item."""
        self.spared = -math.inf
        """When the router said last that a stand-in may go back, in seconds of `time.monotonic`."""

    @property
    def count(self) -> int:
        """Requests and prompts of this router that the worker has."""
        return len(self._submitted) + len(self._prefills)

    def _admit(self, join: Join) -> frames.Welcome:
        port = self._port
        if port.engine is None or port.facts is None:
            raise Refusal("is starting", later=True)
        self._engine = port.engine
        return frames.Welcome(self._hello, port.facts)

    def _joined(self) -> None:
        """See `ServedSession`. The worker's states follow its welcome."""
        self._port.joined(self)

    def live(self) -> None:
        """Runs until the router leaves; then ends everything it has here."""
        try:
            super().live()
        finally:
            self._port.left(self)
            self._restoring.clear()
            submitted, prefills = list(self._submitted), list(self._prefills)
            left = self._port.kept.left(self.post).intersection(submitted)
            cancelled = [attempt for attempt in submitted if attempt not in left]
            for request_id in (*cancelled, *prefills):
                self._engine.cancel(request_id)
            for request_id in submitted:
                self._ended(request_id)
            if submitted or prefills:
                logger.info(
                    "router %s: %d requests cancelled, %d kept for another, %d prompts released",
                    *(self.name, len(cancelled), len(left), len(prefills)),
                )
            self._port._send_state()  # another router may be asked for what is kept

    def flush(self, seconds: float) -> None:
        """Waits until everything queued is sent, or the seconds are over."""
        self.post(sent := threading.Event())
        sent.wait(seconds)

    def _work(self) -> None:
        """Sends the queued frames, with the outputs of a step as one frame."""
        while self.failure is None and (first := self._wanted.get()) is not None:
            items = [first]
            while not self._wanted.empty() and (item := self._wanted.get()) is not None:
                items.append(item)
            if len(items) > MAX_WAITING:
                self.fail(f"it has left {len(items)} outputs unread")
            try:
                for frame in self._gathered(items):
                    frame.set() if isinstance(frame, threading.Event) else self.send(frame)
            except Exception as error:
                if not isinstance(error, OSError):
                    logger.exception("nothing more is sent to router %s", self.name)
                self.fail(f"the connection closed ({error})")
            if len(items) > BUSY:  # the step loop is emitting outputs; do not compete for the GIL
                time.sleep(GATHER_SECONDS)

    def _gathered(self, items: Iterable[Item]) -> list[Frame | threading.Event]:
        """Numbers outputs by their tokens, and makes consecutive ones one frame."""
        found: list[Frame | threading.Event] = []
        outputs: list[TokenOutput] | None = None
        for each in items:
            item = self._numbered(each) if isinstance(each, TokenOutput) else each
            if not isinstance(item, TokenOutput):
                found.append(item)
                outputs = None
            elif outputs is None:
                found.append(Outputs(outputs := [item]))
            else:
                outputs.append(item)
        return found

    def _numbered(self, output: TokenOutput) -> TokenOutput | Frame:
        request_id, reason = output.request_id, output.finish_reason
        offset = self._submitted.get(request_id, 0)
        if reason is not None:
            self._ended(request_id)
        else:
            self._submitted[request_id] = offset + len(output.token_ids)
        msgspec.structs.force_setattr(output, "offset", offset)  # no other thread reads it
        if request_id in self._withdrawn:
            self._withdrawn.discard(request_id)
            if reason == "cancelled" and not output.token_ids:
                text = "it waited for a slot, and another domain has one"
                return frames.Rejected(request_id, SentError.of(OverloadedError(text)))
        return output

    def _ended(self, attempt: str) -> None:
        """Forgets a request."""
        self._submitted.pop(attempt, None)

    def _traced(self, frame: Any, trace: str) -> Any:
        """Begins the spans of a request that has a trace; returns its frame."""
        if trace and self._port.tracing is not None:
            tokens = len(frame.prompt) // frames.TOKEN_BYTES
            self._spans[frame.request_id] = self._port.tracing.worker(trace), tokens
        return frame

    def _noted(self, item: Item) -> None:
        """Queues an item, and notes it where its request is traced; on the engine's thread."""
        match item:
            case TokenOutput() if self._spans and item.request_id in self._spans:
                spans, prompt = self._spans[item.request_id]
                spans.note(item, prompt, item.cached_tokens)
                if item.finish_reason is not None:
                    self._spans.pop(item.request_id, None)
            case frames.Held() | frames.Rejected() if item.request_id in self._spans:
                spans, _ = self._spans.pop(item.request_id)
                spans.held(item.source if isinstance(item, frames.Held) else None)
        self._wanted.put(item)

    # ------------------------------------------------------------------- the router's messages

    def _submit(self, frame: frames.Submit) -> None:
        self._traced(frame, frame.params.trace)
        submit = functools.partial(self._run, _deadline(frame.seconds))
        self._submitted[frame.request_id] = len(frame.emitted) // frames.TOKEN_BYTES
        if not frame.grammar.serialised:
            self._try(frame, submit)
            return
        self._restoring.add(frame.request_id)
        try:
            self._port.compiling.submit(self._try, frame, submit)
        except RuntimeError as error:  # no thread can be started
            self._restoring.discard(frame.request_id)
            self._refuse(frame, OverloadedError(f"a grammar cannot wait: {error}"))

    def _release(self, frame: frames.Release) -> None:
        if self._prefills.pop(frame.request_id, self) is None:
            self._engine.cancel(frame.request_id)

    def _cancel(self, frame: Cancel) -> None:
        if frame.request_id in self._submitted:
            self._port.kept.drop(frame.request_id)
            self._restoring.discard(frame.request_id)
            self._engine.cancel(frame.request_id)

    def _withdraw(self, frame: frames.Withdraw) -> None:
        if frame.request_id in self._submitted:
            self._withdrawn.add(frame.request_id)
            self._restoring.discard(frame.request_id)
            self._engine.withdraw(frame.request_id)

    def _become(self, frame: frames.Become) -> None:
        self.spared = -math.inf if frame.domain else time.monotonic()
        self._port.becomes(frame)

    def _reset(self, frame: frames.Reset) -> None:
        """Waits for the engine's thread, as compiling does."""
        with contextlib.suppress(RuntimeError):  # the pool is shut down
            self._port.compiling.submit(self._engine.reset_prefix_cache)

    def _rebalance(self, frame: frames.Rebalance) -> None:
        """Answers on a thread of its own, since reading the counts of experts may take seconds."""

        def run() -> None:
            try:
                if self._engine.experts is None:
                    raise ValueError("no experts are moved from here")
                proposal = self._engine.experts.rebalance(dry_run=frame.dry_run)
                self.post(frames.Rebalanced(frame.number, msgspec.to_builtins(proposal)))
            except (ValueError, JaxserveError) as error:
                self.post(frames.Rebalanced(frame.number, why=str(error)))

        threading.Thread(target=run, name="rebalance", daemon=True).start()

    def _adopt(self, frame: frames.Adopt) -> None:
        """Takes a request over whose router is gone."""
        self._submitted[frame.request_id] = 0  # before its last output, which may come at once
        try:
            self._port.kept.adopt(frame.request_id, frame.prompt, self.post)
        except (InvalidRequestError, OverloadedError) as error:
            self._refuse(frame, error)

    def _try(self, frame: Any, take: Callable[[Any], None]) -> None:
        """Takes a request, or refuses it with a reason."""
        try:
            if self._port.draining or self._port.drain:
                raise DrainingError("the worker drains and takes no new requests")
            take(frame)
        except Exception as error:
            self._refuse(frame, error)

    def _refuse(self, frame: Any, error: Exception) -> None:
        self._ended(frame.request_id)
        self._prefills.pop(frame.request_id, None)
        self._port.kept.drop(frame.request_id)
        refusal = SentError.of(error)
        if refusal.kind not in KNOWN:
            logger.error("request %s failed", frame.request_id, exc_info=error)
        if isinstance(frame, frames.Prefill):
            self.post(frames.Held(frame.request_id, refusal=refusal))
        else:
            self.post(frames.Rejected(frame.request_id, refusal))

    def _run(self, deadline: float | None, frame: frames.Submit) -> None:
        request_id, params = frame.request_id, frame.params
        restores = bool(frame.grammar.serialised)
        if restores:
            if request_id not in self._restoring:
                self.post(TokenOutput(request_id=request_id, finish_reason="cancelled"))
                return
            grammar = self._port.restored(frame.grammar)
            params = msgspec.structs.replace(params, grammar=grammar)
        self._engine.submit(
            frames.unpacked(frame.prompt),
            params,
            self._port.kept.keep(frame, self.post),
            request_id=request_id,
            deadline=deadline,
            source=frame.source,
            emitted=frames.unpacked(frame.emitted),
        )
        if restores and request_id not in self._restoring:
            self._engine.cancel(request_id)  # the engine did not know it when that was asked for
        self._restoring.discard(request_id)

    def _prefill(self, frame: frames.Prefill) -> None:
        self._prefills[frame.request_id] = None

        def held(result: PagesSource | Exception) -> None:
            if isinstance(result, PagesSource):
                self.post(frames.Held(frame.request_id, result))
            else:
                self._prefills.pop(frame.request_id, None)
                self.post(frames.Held(frame.request_id, refusal=SentError.of(result)))

        self._engine.prefill(
            frames.unpacked(frame.prompt),
            held,
            cache_salt=frame.cache_salt,
            priority=frame.priority,
            request_id=frame.request_id,
            deadline=_deadline(frame.seconds),
        )

    handlers: ClassVar = {
        frames.Submit: _submit,
        frames.Adopt: _adopt,
        frames.Prefill: lambda self, frame: self._try(
            self._traced(frame, frame.trace), self._prefill
        ),
        frames.Release: _release,
        frames.Renew: lambda self, frame: self._engine.renew(frame.hand_off),
        Cancel: _cancel,
        frames.Withdraw: _withdraw,
        frames.Drain: lambda self, frame: self._port.drains(frame.mode),
        frames.Become: _become,
        frames.AskPipeline: lambda self, frame: self.post(frames.Pipeline(self._engine.pipeline())),
        frames.Reset: _reset,
        frames.Rebalance: _rebalance,
    }


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds
