"""A worker's end of the connections to its routers: requests in, outputs out.

`WorkerPort` stands in the place of the network faces (`server/faces.py`) where `serve` runs a
prefill worker or a domain of a fleet. Each router gets the outputs of its own requests, numbered by
their tokens. The requests of a router that is gone, or reads nothing, are cancelled and their pages
released.
"""

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

import jaxserve
from jaxserve.clock import AwakeClock
from jaxserve.engine.interface import TokenEngine
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import (
    DrainingError,
    InvalidRequestError,
    JaxserveError,
    OverloadedError,
)
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.kept_requests import KeptRequests
from jaxserve.fleet.outbox import Outbox
from jaxserve.fleet.request_frames import KNOWN, Cancel, Frame, GrammarOf, Refusal
from jaxserve.link.pages.source import PagesSource
from jaxserve.link.session.channel import Channel, join_address, listen
from jaxserve.link.session.listener import Listener

HANDSHAKE_SECONDS = 5.0
MOST_ROUTERS = 256
AGREED_SECONDS = 15.0
"""Validity of a router's word that it can do without a stand-in; it repeats that every ten seconds
(`stand_ins.py`). A stand-in stays one for at least this long: some routers may not have found it
yet."""
STATE_SECONDS = 0.5
LOOK_SECONDS = 0.5
SILENT_SECONDS = 20.0
"""A router that says nothing for this long is gone: it sends an echo every five seconds."""

logger = logging.getLogger(__name__)

OnHeld = Callable[[PagesSource | JaxserveError], None]


class WorkerEngine(TokenEngine, Protocol):
    """Part of an engine that routers use through this port (`jaxserve.engine.engine.Engine`)."""

    def withdraw(self, request_id: str) -> None: ...
    def release(self, request_id: str) -> None: ...
    def renew(self, hand_off: str) -> None: ...
    def reset_prefix_cache(self) -> int: ...
    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[TokenOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        source: PagesSource | None = None,
        emitted: Sequence[int] = (),
    ) -> str: ...
    def prefill(
        self,
        prompt: list[int],
        on_held: OnHeld,
        *,
        cache_salt: str = "",
        priority: int = 0,
        request_id: str | None = None,
        deadline: float | None = None,
    ) -> str: ...


class WorkerPort:
    """Listens for routers.

    Args:
      address: host:port; port 0 takes a free one.
      token: Secret of the deployment.
      facts: Describes the worker, given its engine.
      restore: Builds a grammar from its serialised form; slow.
      resume_seconds: Time for which requests with keys outlive their router.
      on_become: Starts this worker again as a domain (True) or as the prefill worker that it was;
        gets the reason, too. None: it cannot.

    Attributes:
      address: Address on which it listens.

    Raises:
      ConfigError: the address cannot be listened on, or needs a token.
    """

    def __init__(
        self,
        address: str,
        token: str,
        facts: Callable[[WorkerEngine], frames.WorkerFacts],
        restore: Callable[[GrammarOf, int], Any],
        resume_seconds: float = 0.0,
        on_become: Callable[[bool, str], None] | None = None,
    ):
        self.on_become = on_become
        self._make_facts, self._restore = facts, restore
        self._socket = listen(address, token)
        self.address = join_address(*self._socket.getsockname()[:2])
        self._listener = Listener(
            "routers",
            token,
            self._welcome,
            most=MOST_ROUTERS,
            seconds=HANDSHAKE_SECONDS,
            frame_bytes=frames.WORKER_FRAME_BYTES,
        )
        self.engine: WorkerEngine | None = None
        self.facts: frames.WorkerFacts | None = None
        self.draining = False
        """True once the worker ends."""
        self.drain: frames.DrainMode = ""
        """Drain that an operator asked for; see `frames.Drain`."""
        self.kept = KeptRequests(resume_seconds, self._cancel)
        self._stopping = threading.Event()
        self._routers: set[RouterConnection] = set()  # any thread changes it, and copies it
        self._opened = math.inf
        self.compiling = ThreadPoolExecutor(1, "grammars")

    def start(self) -> dict[str, str]:
        """Listens; routers are refused until `open`. Returns {"worker": address}."""
        return {"worker": self._listener.start(self._socket)}

    def open(self, engine: WorkerEngine) -> None:
        """Takes requests from now on."""
        self.facts = self._make_facts(engine)
        self.engine, self._opened = engine, time.monotonic()
        engine.add_failure_callback(lambda _failure: self._send_state())
        threading.Thread(target=self._tick, name="worker-state", daemon=True).start()

    def refuse(self) -> None:
        """Refuses new requests; running ones go on."""
        self.draining = True

    def drains(self, mode: frames.DrainMode) -> None:
        """Refuses new requests while the mode is not empty, and tells all routers."""
        if mode != self.drain:
            logger.info("drain: %s", mode or "no more")
        self.drain = mode
        self._send_state()

    def becomes(self, domain: bool, why: str) -> None:
        """Starts again in another role; its requests go elsewhere first.

        One router that lacks domains makes it one. It goes back only when every router can do
        without it: routers that see different workers would have it start again and again.
        """
        latest = time.monotonic() - AGREED_SECONDS
        spared = self._opened < latest and all(r.spared > latest for r in self._connected())
        if self.on_become is not None and (domain or spared):
            self.drains("move")
            self.on_become(domain, why)

    def stop(self, grace: float) -> None:
        """Ends all connections, once their last outputs are sent or `grace` seconds are over."""
        self.draining = True
        self._send_state()
        deadline = time.monotonic() + grace
        for router in self._connected():
            router.flush(max(0.0, deadline - time.monotonic()))
        self._stopping.set()
        self._listener.close(max(0.0, deadline - time.monotonic()))
        self.compiling.shutdown(wait=False, cancel_futures=True)

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
        orphans = self.kept.orphans
        return frames.State(status, age, engine.load(), failure, others, drain, orphans)

    def left(self, router: "RouterConnection") -> None:
        """Forgets a connection."""
        self._routers.discard(router)

    def _cancel(self, request_id: str) -> None:
        if self.engine is not None:
            self.engine.cancel(request_id)

    def _connected(self) -> list["RouterConnection"]:
        return list(self._routers)

    def _welcome(self, channel: Channel) -> None:
        """Takes a router in, and serves it until it leaves."""
        try:
            if not channel.wait(HANDSHAKE_SECONDS):
                return
            join = frames.decode_from_router(channel.receive())
            if reason := self._refusal(join):
                channel.send(frames.encode(frames.Refused(reason)))
                return
            assert isinstance(join, frames.Join)
            assert self.facts is not None
            channel.send(frames.encode(frames.Welcome(self.facts)))
            router = RouterConnection(self, channel, join.router)
            self._routers.add(router)
            self._send_state()
            router.serve()
        except (OSError, EOFError, msgspec.DecodeError, ValueError) as error:
            logger.info("router at %s: %s", channel.peer, error or "left")
        finally:
            channel.close()

    def _refusal(self, join: frames.FromRouter) -> str:
        if not isinstance(join, frames.Join):
            return f"{type(join).__name__} came before Join"
        if join.protocol != frames.PROTOCOL:
            return (
                f"the router (version {join.version}) speaks protocol {join.protocol}, this worker "
                f"(version {jaxserve.__version__}) {frames.PROTOCOL}"
            )
        if self.engine is None:
            return "is starting"
        return ""

    def _tick(self) -> None:
        while not self._stopping.wait(STATE_SECONDS):
            try:
                self.kept.tick()
                self._send_state()
            except Exception:  # routers would take the worker for dead without its states
                logger.exception("the worker's state")

    def _send_state(self) -> None:
        if self.engine is not None:
            counts = {router: router.count for router in self._connected()}
            everyone = sum(counts.values())
            for router, own in counts.items():
                router.post(self.state(everyone - own))


class RouterConnection:
    """One router's requests, and the way of their outputs to it."""

    def __init__(self, port: WorkerPort, channel: Channel, name: str):
        assert port.engine is not None
        self._port, self._engine, self._channel, self.name = port, port.engine, channel, name
        # Ids. The engine's thread and the pool's change them, too: copy before iterating.
        self._submitted: dict[str, int] = {}  # id → tokens so far
        self._restoring: set[str] = set()  # still wanted, but their grammars are not there yet
        self._prefills: dict[str, None] = {}  # ids; until released
        self._withdrawn: set[str] = set()  # ids that may go elsewhere, without a token so far
        self._outbox = Outbox(f"router-{name}", self._send, lambda ended: [], channel.shutdown)
        self.post = self._outbox.post
        """Queues a frame or an output for the router."""
        self.flush = self._outbox.flush
        """Waits until everything queued is sent, or the given seconds are over."""
        self.spared = -math.inf
        """When the router said last that a stand-in may go back, in seconds of `time.monotonic`."""

    @property
    def count(self) -> int:
        """Requests and prompts of this router that the worker has."""
        return len(self._submitted) + len(self._prefills)

    def serve(self) -> None:
        """Takes frames until the router leaves; then ends everything it has here."""
        logger.info("router %s at %s is connected", self.name, self._channel.peer)
        try:
            clock = AwakeClock(2 * LOOK_SECONDS)
            heard = 0.0
            while clock.tick() - heard < SILENT_SECONDS:
                if self._channel.wait(LOOK_SECONDS):
                    self._take(frames.decode_from_router(self._channel.receive()))
                    heard = clock.now
        finally:
            self._port.left(self)
            self._outbox.close()
            self._restoring.clear()
            submitted, prefills = list(self._submitted), list(self._prefills)
            left = [attempt for attempt in submitted if self._port.kept.leave(attempt)]
            self._port.kept.left(self._output)
            submitted = [attempt for attempt in submitted if attempt not in left]
            for request_id in submitted:
                self._engine.cancel(request_id)
            for request_id in prefills:
                self._engine.release(request_id)
            logger.info(
                "router %s left; %d requests cancelled, %d kept for another, %d prompts released",
                *(self.name, len(submitted), len(left), len(prefills)),
            )
            self._port._send_state()  # another router may be asked for what is kept

    def _take(self, frame: frames.FromRouter) -> None:
        match frame:
            case frames.Submit():
                submit = functools.partial(self._submit, _deadline(frame.seconds))
                self._submitted[frame.request_id] = len(frame.emitted) // frames.TOKEN_BYTES
                if frame.grammar.serialised:
                    self._restoring.add(frame.request_id)
                    try:
                        self._port.compiling.submit(self._try, frame, submit)
                    except RuntimeError as error:  # no thread can be started
                        self._restoring.discard(frame.request_id)
                        self._refuse(frame, OverloadedError(f"a grammar cannot wait: {error}"))
                else:
                    self._try(frame, submit)
            case frames.Adopt():
                self._adopt(frame)
            case frames.Prefill():
                self._try(frame, self._prefill)
            case frames.Release(request_id=request_id):
                if self._prefills.pop(request_id, self) is None:
                    self._engine.release(request_id)
            case frames.Renew(hand_off=hand_off):
                self._engine.renew(hand_off)
            case Cancel(request_id=request_id):
                if request_id in self._submitted:
                    self._port.kept.drop(request_id)
                    self._restoring.discard(request_id)
                    self._engine.cancel(request_id)
            case frames.Withdraw(request_id=request_id):
                if request_id in self._submitted:
                    self._withdrawn.add(request_id)
                    self._restoring.discard(request_id)
                    self._engine.withdraw(request_id)
            case frames.Drain(mode=mode):
                self._port.drains(mode)
            case frames.Become(domain=domain, why=why):
                self.spared = -math.inf if domain else time.monotonic()
                self._port.becomes(domain, why)
            case frames.AskPipeline():
                self.post(frames.Pipeline(self._engine.pipeline()))
            case frames.Reset():  # waits for the engine's thread, as compiling does
                with contextlib.suppress(RuntimeError):  # the pool is shut down
                    self._port.compiling.submit(self._engine.reset_prefix_cache)
            case frames.Echo():
                self.post(frame)
            case frames.Join():
                raise ValueError("joins twice")

    def _try(self, frame: Any, take: Callable[[Any], None]) -> None:
        """Takes a request, or refuses it with a reason."""
        try:
            if self._port.draining or self._port.drain:
                raise DrainingError("the worker drains and takes no new requests")
            take(frame)
        except Exception as error:
            self._refuse(frame, error)

    def _refuse(self, frame: Any, error: Exception) -> None:
        self._submitted.pop(frame.request_id, None)
        self._prefills.pop(frame.request_id, None)
        self._port.kept.drop(frame.request_id)
        refusal = Refusal.of(error)
        if refusal.kind not in KNOWN:
            logger.error("request %s failed", frame.request_id, exc_info=error)
        if isinstance(frame, frames.Prefill):
            self.post(frames.Held(frame.request_id, refusal=refusal))
        else:
            self.post(frames.Rejected(frame.request_id, refusal))

    def _submit(self, deadline: float | None, frame: frames.Submit) -> None:
        request_id, params = frame.request_id, frame.params
        restores = bool(frame.grammar.serialised)
        if restores:
            if request_id not in self._restoring:
                self._output(TokenOutput(request_id=request_id, finish_reason="cancelled"))
                return
            grammar = self._port.restored(frame.grammar)
            params = msgspec.structs.replace(params, grammar=grammar)
        self._engine.submit(
            frames.unpacked(frame.prompt),
            params,
            self._port.kept.keep(frame, self._output),
            request_id=request_id,
            deadline=deadline,
            source=frame.source,
            emitted=frames.unpacked(frame.emitted),
        )
        if restores and request_id not in self._restoring:
            self._engine.cancel(request_id)  # the engine did not know it when that was asked for
        self._restoring.discard(request_id)

    def _adopt(self, frame: frames.Adopt) -> None:
        """Takes a request over whose router is gone."""
        self._submitted[frame.request_id] = 0  # before its last output, which may come at once
        try:
            self._port.kept.adopt(frame.request_id, frame.prompt, self._output)
        except (InvalidRequestError, OverloadedError) as error:
            self._refuse(frame, error)

    def _output(self, output: TokenOutput) -> None:
        request_id, reason = output.request_id, output.finish_reason
        offset = self._submitted.get(request_id, 0)
        if reason is not None:
            self._submitted.pop(request_id, None)
        else:
            self._submitted[request_id] = offset + len(output.token_ids)
        msgspec.structs.force_setattr(output, "offset", offset)  # nobody else reads it
        if request_id in self._withdrawn:
            self._withdrawn.discard(request_id)
            if reason == "cancelled" and not output.token_ids:
                text = "it waited for a slot, and another domain has one"
                self.post(frames.Rejected(request_id, Refusal.of(OverloadedError(text))))
                return
        self.post(output)

    def _prefill(self, frame: frames.Prefill) -> None:
        self._prefills[frame.request_id] = None

        def held(result: PagesSource | Exception) -> None:
            if isinstance(result, PagesSource):
                self.post(frames.Held(frame.request_id, result))
            else:
                self._prefills.pop(frame.request_id, None)
                self.post(frames.Held(frame.request_id, refusal=Refusal.of(result)))

        self._engine.prefill(
            frames.unpacked(frame.prompt),
            held,
            cache_salt=frame.cache_salt,
            priority=frame.priority,
            request_id=frame.request_id,
            deadline=_deadline(frame.seconds),
        )

    def _send(self, found: Sequence[Frame]) -> None:
        for frame in found:
            self._channel.send(frames.encode(frame))


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds
