"""The thread around the loop: takes requests from any thread, runs steps, delivers outputs.

The engine's thread feeds events to `loop.py`, which decides the next action; `stepper.py` carries
it out. Knows nothing of text or networks.
"""

import atexit
import gc
import logging
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, SupportsIndex

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.engine.admission import choose_domain
from jaxserve.engine.loop import Idle, Loop
from jaxserve.engine.request import Grammar, Request, RequestChecks, SamplingParams, TokenOutput
from jaxserve.engine.runtime import Driver
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.stepper import (
    PREFILL_PARAMS,
    Command,
    Followers,
    HandOffs,
    OnHeld,
    Post,
    ResultReader,
    Stepper,
)
from jaxserve.errors import DrainingError, EngineFailedError, InvalidRequestError, OverloadedError
from jaxserve.link.pages.source import PagesSource
from jaxserve.observe.compilation import CompilationCounter
from jaxserve.observe.load import EngineLoad
from jaxserve.observe.view import PipelineView
from jaxserve.observe.watch import Watch
from jaxserve.roles.worker import MovesExperts

if TYPE_CHECKING:
    from jaxserve.link.remote.client import MessageClient
    from jaxserve.roles.compilation import StepCompiler

logger = logging.getLogger(__name__)

OnOutput = Callable[[TokenOutput], None]
NOBODY = None, None
"""Receiver and grammar of a request that is not open."""

IDLE_SECONDS = 0.5
"""Seconds that the idle loop sleeps before it checks again; a submit wakes it."""
FAILED_SECONDS = 1.0
"""Seconds that `close` waits for a device read after a failure."""
RESET_SECONDS = 30.0
"""Seconds that a reset of the prefix caches waits for the loop's thread."""
EXIT_SECONDS = 10.0
"""Seconds that the interpreter's exit waits for the step loop of an engine that was not closed."""


class Engine:
    """Serves requests on one deployment. Built by `fleet.assembly.open_engine`.

    Args:
      deployment: limits and deadlines.
      schedulers: decide the steps, one a domain; only the engine's thread touches them.
      driver: enqueues them.
      vocab: token ids a prompt may hold are below it.
      eos_token_ids: the model's end ids.
      followers: other processes of the runtime, which run the same plans.
      link: to runtimes that this one needs; closed with the engine.
      info: what `model_info` reports.
      watch: measures the pipeline; None: it is not measured.
      experts: moves experts, or asks the runtime that has them to; None: the model has none.
    """

    def __init__(
        self,
        deployment: Deployment,
        schedulers: Sequence[Scheduler],
        driver: Driver,
        *,
        vocab: int,
        eos_token_ids: frozenset[int],
        followers: Followers | None = None,
        link: "MessageClient | None" = None,
        info: dict[str, Any] | None = None,
        watch: Watch | None = None,
        experts: MovesExperts | None = None,
    ):
        self.deployment, self.driver, self.schedulers = deployment, driver, list(schedulers)
        self._checks = RequestChecks(self.schedulers[0].limits, vocab, eos_token_ids)
        self._followers, self.link = followers, link
        self._info, self._watch, self.experts = info or {}, watch, experts
        self._compiler: StepCompiler | None = getattr(driver, "compiler", None)
        if (compiler := self._compiler) is not None:
            for scheduler in schedulers:
                scheduler.queue.takes_options = lambda: compiler.takes_options
                scheduler.composer.token_budget = lambda: compiler.token_budget
        self._wake = threading.Condition()
        self._commands: deque[Command] = deque()
        self._open: dict[str, tuple[OnOutput, Grammar | None]] = {}
        self._queued = 0
        self.status = "starting"
        """ "starting", "ready", "draining", "failed" or "closed"."""
        self.last_turn = time.monotonic()
        """Seconds of `time.monotonic` of the step loop's last iteration, idle or not."""
        self.failure: EngineFailedError | None = None
        """Reason why the status is "failed"."""
        self._on_failure: list[Callable[[EngineFailedError], None]] = []
        self._loop = Loop(self.schedulers, len(self.schedulers) * deployment.lanes, time.monotonic)
        self.hand_offs = HandOffs()  # see `hand_off_with`
        self.host_pages: dict[str, float] = {}  # counters, see `page_tier.py`
        self._results = ResultReader()
        self._stepper = Stepper(
            self._loop,
            driver,
            self.hand_offs,
            self._results,
            step_seconds=deployment.cluster.step_seconds,
            failure=lambda: self.failure,
            interrupted=lambda: bool(self._commands),
            followers=followers,
            watch=watch,
            experts=experts,
        )
        self.tell = self._stepper.tell  # followers, of pages; on the engine's thread
        self._compilations: CompilationCounter | None = None
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)

    @property
    def compilations_after_ready(self) -> int:
        """Number of compilations that the step loop waited for since `start`; should stay 0."""
        return self._compilations.count if self._compilations else 0

    def load(self) -> EngineLoad:
        """Load of the engine; may be read from any thread."""
        cache = self.deployment.cache
        return EngineLoad.of(
            queued=self._queued,
            slots=sum(scheduler.capacity for scheduler in self.schedulers),
            page_size=cache.page_size,
            pages=cache.pages,
            compilations=self.compilations_after_ready,
            held=self.hand_offs.held,
            hand_offs=self.hand_offs.load,
            host_pages=dict(self.host_pages),
            problems=() if self.link is None else self.link.problems,
            domains=self._loop.load(),
        )

    def pipeline(self) -> PipelineView:
        """Returns a view of the steps measured last, and makes further steps be measured."""
        view = PipelineView() if self._watch is None else self._watch.look()
        if self.experts is None:
            return view
        return msgspec.structs.replace(view, experts=self.experts.view())

    def model_info(self) -> dict[str, Any]:
        """Model, layout and limits, as plain values."""
        return dict(self._info)

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        """Calls back once if the engine fails, on whatever thread notices; at once if it has."""
        with self._wake:
            if self.failure is None:
                self._on_failure.append(callback)
                return
        callback(self.failure)

    def start(self) -> None:
        """Starts the loop; the engine is ready afterwards.

        Raises:
          EngineFailedError: it has failed, or ended, before.
        """
        with self._wake:
            if self.status != "starting":
                self._raise_unless_ready()
                return
            self.status = "ready"
        self._compilations = CompilationCounter(self._thread)
        if self.experts is not None:
            self.experts.start()
        _running.add(self)
        self._thread.start()
        if self._compiler is not None:
            self._compiler.start(lambda: self._post(tuple), self.fail)

    def hand_off_with[Links: HandOffs](self, make: Callable[[Loop, Post], Links]) -> Links:
        """Replaces the hand-offs by the ends of links that `make` makes. Called before the start.

        Args:
          make: takes the loop, for the engine's thread alone, and a function that posts to it.
        """
        made = make(self._loop, self._post)
        self.hand_offs = self._stepper.hand_offs = made
        return made

    def submit(
        self,
        prompt: Sequence[SupportsIndex],
        params: SamplingParams,
        on_output: OnOutput,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        source: PagesSource | None = None,
        emitted: Sequence[SupportsIndex] = (),
    ) -> str:
        """Queues a request and returns its id.

        Args:
          prompt: token ids.
          params: how to sample.
          on_output: called on the engine's thread with every piece of news; must return at once.
          request_id: unique among open requests; drawn if None.
          deadline: `time.monotonic` seconds at which the request is given up.
          source: where a prefill worker holds the prompt's KV entries; None: nowhere.
          emitted: tokens that another engine has generated; this one continues with the tokens that
            the other would have generated. A source then holds the prompt and these tokens.

        Raises:
          InvalidRequestError: a field is out of range, or this engine has no link to prefill
            workers; names the field.
          OverloadedError: the waiting queue is full.
          DrainingError, EngineFailedError: nothing new is taken.
        """
        request = self._checks.request(
            prompt, params, request_id or uuid.uuid4().hex, deadline, emitted
        )
        request = msgspec.structs.replace(request, source=source)
        return self._take_in(request, on_output)

    def prefill(
        self,
        prompt: Sequence[SupportsIndex],
        on_held: OnHeld,
        *,
        cache_salt: str = "",
        priority: int = 0,
        request_id: str | None = None,
        deadline: float | None = None,
    ) -> str:
        """Computes the KV entries of a prompt and holds them under a lease for a decode domain.

        Args:
          prompt: token ids.
          on_held: called once, on the engine's thread: with the source, or with what went wrong
            (cancelled, deadline, failed). The lease runs from then on.
          cache_salt, priority: as of `SamplingParams`.
          request_id: for `cancel`, which also gives held pages back; drawn if None.
          deadline: `time.monotonic` seconds at which it is given up, if it is not held by then.

        Raises:
          InvalidRequestError: a field is out of range, or this engine has no pages server.
          OverloadedError: too many prompts wait.
          DrainingError, EngineFailedError: nothing new is taken.
        """
        params = msgspec.structs.replace(PREFILL_PARAMS, cache_salt=cache_salt, priority=priority)
        request = self._checks.request(prompt, params, request_id or uuid.uuid4().hex, deadline)
        size = self.deployment.cache.page_size
        # Whole pages only: the domain that continues always feeds the last token itself.
        held = list(request.prompt[: (len(request.prompt) - 1) // size * size])
        request = msgspec.structs.replace(request, prompt=held, hold=True)
        return self._take_in(request, self.hand_offs.told(request, on_held))

    def renew(self, hand_off: str) -> None:
        """Begins the lease of held pages anew; ignores unknown ones."""
        self.hand_offs.renew([hand_off])

    def check(self, prompt: Sequence[SupportsIndex], params: SamplingParams) -> None:
        """Raises InvalidRequestError if `submit` would for this prompt and these parameters."""
        self._checks.request(prompt, params, "", None)

    def cancel(self, request_id: str) -> None:
        """Ends a request; ignores unknown and ended ones."""
        self._post(lambda: self._loop.cancel(request_id))

    def withdraw(self, request_id: str) -> None:
        """Ends a request, as cancelled, if it still waits for its first slot. Pages held for it
        stay held, for another domain. A running or unknown request is left alone."""

        def withdraw() -> list[TokenOutput]:
            if not self._loop.waits(request_id):
                return []
            self.hand_offs.leave(request_id)
            return self._loop.cancel(request_id)

        self._post(withdraw)

    def reset_prefix_cache(self) -> int:
        """Empties the prefix caches of the domains, and waits for it.

        Returns:
          number of pages that this freed; pages in use are given back by their sequences later.

        Raises:
          EngineFailedError: the engine does not run, or did not get to it in time.
        """
        freed: Future[int] = Future()

        def reset() -> None:
            freed.set_result(sum(one.reset_prefix_caches() for one in self.schedulers))

        self._raise_unless_ready()
        self._post(reset)
        try:
            return freed.result(RESET_SECONDS)
        except TimeoutError:
            raise EngineFailedError(f"no step ended within {RESET_SECONDS:g} s") from None

    def drain(self, timeout: float) -> bool:
        """Accepts no more requests and waits for the open ones; False if `timeout` came first."""
        end = time.monotonic() + timeout
        with self._wake:
            if self.status == "ready":
                self.status = "draining"
            if not self._wake.wait_for(lambda: not self._open, timeout):
                return False
        while self.hand_offs.held and self.status == "draining":  # others still fetch them
            if time.monotonic() >= end:
                return False
            time.sleep(min(0.05, timeout))
        return True

    def close(self, timeout: float | None = None) -> None:
        """Ends the loop and releases the devices; open requests end as cancelled. May be repeated.

        Args:
          timeout: seconds to wait for the step under way; None: `cluster.step_seconds`.
        """
        with self._wake:
            if self.status != "failed":
                self.status = "closed"
            self._wake.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self.deployment.cluster.step_seconds if timeout is None else timeout)
        for request_id in list(self._open):
            self._deliver([TokenOutput(request_id=request_id, finish_reason="cancelled")])
        self.hand_offs.close()
        # What a failed step would have given may never come.
        self._results.close(EXIT_SECONDS if self.failure is None else FAILED_SECONDS)
        for part in (self._compiler, self._watch, self.experts, self.link):
            if part is not None:
                part.close()
        gc.unfreeze()  # see `engine/runtime.py`
        if self._compilations is not None:
            self._compilations.stop()
        self._release_devices()

    def _release_devices(self) -> None:
        """Drops the weights and the KV cache, which belong to the driver, once the loop is over."""
        if self._thread.is_alive():
            return
        self._watch = self.experts = None  # it moves the weights of experts
        for name in ("_stepper", "tell"):
            self.__dict__.pop(name, None)
        if self.__dict__.pop("driver", None) is not None:
            gc.collect()  # programs and weights refer to each other

    def fail(self, error: EngineFailedError) -> None:
        """Marks the engine as failed and ends every open request with the error; any thread."""
        with self._wake:
            if self.failure is not None or self.status == "closed":
                return
            self.failure, self.status = error, "failed"
            self._wake.notify_all()
        logger.error("engine failed: %s", error)
        for request_id in list(self._open):
            news = TokenOutput(
                request_id=request_id, finish_reason="error", error=str(error), engine_failed=True
            )
            self._deliver([news])
        for callback in self._on_failure:
            try:
                callback(error)
            except Exception:
                logger.exception("a failure callback failed")

    def _post(self, command: Command) -> None:
        """Has something done on the engine's thread; from any thread."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _take_in(self, request: Request, on_output: OnOutput) -> str:
        """Opens a checked request and queues it for the engine's thread; returns its id."""
        request_id, grammar = request.request_id, request.params.grammar
        with self._wake:
            self._raise_unless_ready()
            if request_id in self._open:
                raise InvalidRequestError("request_id", f"{request_id!r} is running already")
            if grammar is not None and any(grammar is other for _, other in self._open.values()):
                raise InvalidRequestError("grammar", "is another running request's")
            waiting = self._loop.waiting + self._queued  # the latter for a domain, too
            if waiting >= self.deployment.scheduler.max_waiting:
                raise OverloadedError(f"{waiting} requests wait already")
            self.hand_offs.keep(request)
            self._open[request_id] = on_output, grammar
            self._queued += 1
            self._commands.append(lambda: self._add(request))
            self._wake.notify()
        return request_id

    def _raise_unless_ready(self) -> None:
        if self.failure is not None:
            # A new one for everybody: an error that is raised again and again keeps every stack.
            raise EngineFailedError(str(self.failure))
        if self.status == "draining":
            raise DrainingError("the server is shutting down and takes no new requests")
        if self.status != "ready":
            raise EngineFailedError(f"the engine is {self.status}")

    def _add(self, request: Request) -> list[TokenOutput]:
        with self._wake:
            self._queued -= 1
        if request.hold and not request.prompt:  # it has no full page
            return [TokenOutput(request_id=request.request_id, finish_reason="length")]
        try:
            if request.hold:
                self._loop.prefill(request)
            else:
                self._loop.submit(request, choose_domain(self.schedulers, request))
        except (InvalidRequestError, OverloadedError) as error:
            return [
                TokenOutput(request_id=request.request_id, finish_reason="error", error=str(error))
            ]
        return []

    def _run(self) -> None:
        try:
            while self.status in ("ready", "draining"):
                self.last_turn = time.monotonic()
                self._take_events()
                self._step()
        except Exception as error:
            if isinstance(error, EngineFailedError):
                failure = error
            else:
                logger.exception("step loop")
                failure = EngineFailedError(f"step loop: {error!r} after {self.driver.position()}")
            self.fail(failure if self._followers is None else self._followers.explain(failure))

    def _take_events(self) -> None:
        """Feeds events to the loop: commands, deadlines, results."""
        while self._commands:
            with self._wake:
                command = self._commands.popleft()
            self._deliver(command() or ())
        self._deliver(self._loop.tick())
        while (outputs := self._stepper.completed()) is not None:
            self._deliver(outputs)

    def _step(self) -> None:
        """Carries out the loop's next action; waits for a command if it has none."""
        done = self._stepper.step()
        if isinstance(done, Idle):
            self._sleep(done.until)
        elif done is not None:
            self._deliver(done)

    def _deliver(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            callback, _ = self._open.get(output.request_id, NOBODY)
            self.hand_offs.forget(output.request_id)
            if output.finish_reason is not None:
                with self._wake:  # a request ends once, on whichever thread notices first
                    callback, _ = self._open.pop(output.request_id, NOBODY)
                    if not self._open:
                        self._wake.notify_all()
            if callback is None or output.says_nothing:
                continue
            try:
                callback(output)
            except Exception:
                logger.exception("request %s: its receiver failed", output.request_id)
                self.cancel(output.request_id)

    def _sleep(self, until: float | None) -> None:
        """Waits for a command, or until the next deadline, in seconds of `time.monotonic`."""
        seconds = IDLE_SECONDS if until is None else min(IDLE_SECONDS, until - time.monotonic())
        with self._wake:
            if not self._commands and self.status in ("ready", "draining"):
                self._wake.wait(max(0.0, seconds))


_running: "weakref.WeakSet[Engine]" = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Ends the threads of engines that were not closed: the interpreter would abort when it ends
    around them, for they are inside JAX most of the time."""
    for engine in list(_running):
        engine.close(EXIT_SECONDS)
