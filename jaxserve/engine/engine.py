"""The step loop: requests in, tokens out, one thread, one step ahead of what it has read.

`submit` and `cancel` may be called from any thread; everything else happens on the engine's own.
Each turn of the loop plans the idle lanes, tells the followers, and has the driver enqueue stages
until a lane has left its step. A step's sampled tokens are read while the lane's next step is
already under way (design, decision 8). Knows nothing of text or networks.
"""

import logging
import operator
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsIndex

import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.engine.garbage import IdleCollection, thaw
from jaxserve.engine.load import EngineLoad
from jaxserve.engine.request import Grammar, Request, SamplingParams, TokenOutput
from jaxserve.engine.results import ResultReader
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.view import PipelineView
from jaxserve.engine.watch import Watch
from jaxserve.errors import (
    DrainingError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
)
from jaxserve.pipeline.compilation import CompilationCounter
from jaxserve.pipeline.plan import StepPlan
from jaxserve.pipeline.sampling import Finished

logger = logging.getLogger(__name__)

OnOutput = Callable[[TokenOutput], None]
Broadcast = Callable[[list[StepPlan], bool], None]
"""Takes the plans of a boundary, and whether what follows it is measured."""
Explain = Callable[[EngineFailedError], EngineFailedError]

IDLE_SECONDS = 0.5
"""How long the idle loop sleeps before it looks around again; a submit wakes it."""


class Driver(Protocol):
    """What the loop needs of `pipeline.driver`."""

    @property
    def active(self) -> bool: ...
    @property
    def idle_lanes(self) -> list[int]: ...
    def begin(self, plan: StepPlan) -> None: ...
    def advance(self) -> Finished: ...
    def position(self) -> tuple[str, int, int, int] | None: ...


class Engine:
    """Serves requests on one deployment. Built by `engine.build.build_engine`.

    Args:
      deployment: limits and deadlines.
      scheduler: decides the steps; only the engine's thread touches it.
      driver: enqueues them.
      vocab: token ids a prompt may hold are below it.
      eos_token_ids: the model's end ids.
      broadcast: tells the followers the plans of each boundary, before the driver runs them.
      explain: finds who is behind a step's error; with several processes it is often a peer.
      info: what `model_info` reports.
      watch: measures the pipeline; None: nobody does.
    """

    def __init__(
        self,
        deployment: Deployment,
        scheduler: Scheduler,
        driver: Driver,
        *,
        vocab: int,
        eos_token_ids: frozenset[int],
        broadcast: Broadcast | None = None,
        explain: Explain | None = None,
        info: dict[str, Any] | None = None,
        watch: Watch | None = None,
    ):
        self.deployment = deployment
        self.driver = driver
        self.scheduler = scheduler
        self._vocab = vocab
        self._eos_token_ids = eos_token_ids
        self._broadcast = broadcast
        self._explain = explain or (lambda error: error)
        self._info = info or {}
        self._watch = watch
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], list[TokenOutput]]] = deque()
        self._open: dict[str, OnOutput] = {}
        self._deadlines: dict[str, float] = {}
        self._grammars: dict[str, Grammar] = {}
        self._queued = 0
        self._status = "starting"
        self._last_turn = time.monotonic()
        self._failure: EngineFailedError | None = None
        self._failure_callbacks: list[Callable[[EngineFailedError], None]] = []
        self._results = ResultReader()
        self._garbage = IdleCollection()
        self._in_flight: deque[StepPlan] = deque()
        self._compilations: CompilationCounter | None = None
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)

    @property
    def status(self) -> str:
        """ "starting", "ready", "draining", "failed" or "closed"."""
        return self._status

    @property
    def failure(self) -> EngineFailedError | None:
        """Why the engine failed, if it did."""
        return self._failure

    @property
    def last_turn(self) -> float:
        """Seconds of `time.monotonic` at which the step loop last went round, idle or not."""
        return self._last_turn

    @property
    def compilations_after_ready(self) -> int:
        """Programs that the step loop had to wait for since `start`: more than 0 is a flaw."""
        return self._compilations.count if self._compilations else 0

    def load(self) -> EngineLoad:
        """How much there is to do; from any thread."""
        cache, scheduler = self.deployment.cache, self.scheduler
        return EngineLoad(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + self._queued,
            kv_usage=scheduler.kv_usage,
            page_size=cache.page_size,
            pages=cache.pages,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prompt_tokens,
            prefix_hits=scheduler.prompt_tokens_found,
            compilations=self.compilations_after_ready,
        )

    def pipeline(self) -> PipelineView:
        """What the steps measured last looked like; asking has more of them measured."""
        return PipelineView() if self._watch is None else self._watch.look()

    def model_info(self) -> dict[str, Any]:
        """Model, layout and limits, as plain values."""
        return dict(self._info)

    def add_failure_callback(self, callback: Callable[[EngineFailedError], None]) -> None:
        """Calls back once if the engine fails, on whatever thread notices; at once if it has."""
        with self._wake:
            if self._failure is None:
                self._failure_callbacks.append(callback)
                return
        callback(self._failure)

    def start(self) -> None:
        """Starts the loop; the engine is ready afterwards.

        Raises:
          EngineFailedError: it has failed, or ended, before.
        """
        with self._wake:
            if self._status != "starting":
                self._raise_unless_ready()
                return
            self._status = "ready"
        self._compilations = CompilationCounter(self._thread)
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[SupportsIndex],
        params: SamplingParams,
        on_output: OnOutput,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
    ) -> str:
        """Queues a request and returns its id.

        Args:
          prompt: token ids.
          params: how to sample.
          on_output: called on the engine's thread with every piece of news; must return at once.
          request_id: unique among open requests; drawn if None.
          deadline: `time.monotonic` seconds at which the request is given up.

        Raises:
          InvalidRequestError: a field is out of range; names it.
          OverloadedError: the waiting queue is full.
          DrainingError, EngineFailedError: nothing new is taken.
        """
        params.validate()
        token_ids = self._token_ids(prompt)
        request = Request(
            request_id=request_id or uuid.uuid4().hex,
            prompt=token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids,
            seed=params.seed if params.seed is not None else random.getrandbits(32),
            arrival=time.monotonic(),
            deadline=deadline,
        )
        self.scheduler.check(request)
        self._check_tokens(params)
        with self._wake:
            self._raise_unless_ready()
            if request.request_id in self._open:
                raise InvalidRequestError(
                    "request_id", f"{request.request_id!r} is running already"
                )
            if any(params.grammar is other for other in self._grammars.values()):
                raise InvalidRequestError("grammar", "is another running request's")
            waiting = self.scheduler.num_waiting + self._queued
            if waiting >= self.deployment.scheduler.max_waiting:
                raise OverloadedError(f"{waiting} requests wait already")
            self._open[request.request_id] = on_output
            if deadline is not None:
                self._deadlines[request.request_id] = deadline
            if params.grammar is not None:
                self._grammars[request.request_id] = params.grammar
            self._queued += 1
            self._commands.append(lambda: self._add(request))
            self._wake.notify()
        return request.request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request; unknown and ended ones are fine."""
        with self._wake:
            self._commands.append(lambda: self.scheduler.cancel(request_id))
            self._wake.notify()

    def drain(self, timeout: float) -> bool:
        """Takes nothing new and waits until what runs has ended; False if `timeout` came first."""
        with self._wake:
            if self._status == "ready":
                self._status = "draining"
            return self._wake.wait_for(lambda: not self._open, timeout)

    def close(self) -> None:
        """Ends the loop; open requests end as cancelled. Once is enough, more does no harm."""
        with self._wake:
            if self._status != "failed":
                self._status = "closed"
            self._wake.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self.deployment.cluster.step_seconds)
        for request_id in list(self._open):
            self._deliver([TokenOutput(request_id=request_id, finish_reason="cancelled")])
        self._results.close()
        if self._watch is not None:
            self._watch.close()
        thaw()
        if self._compilations is not None:
            self._compilations.stop()

    def fail(self, error: EngineFailedError) -> None:
        """Marks the engine as failed and ends every open request with the error; any thread."""
        with self._wake:
            if self._failure is not None or self._status == "closed":
                return
            self._failure, self._status = error, "failed"
            self._wake.notify_all()
        logger.error("engine failed: %s", error)
        for request_id in list(self._open):
            news = TokenOutput(request_id=request_id, finish_reason="error", error=str(error))
            self._deliver([news])
        for callback in self._failure_callbacks:
            try:
                callback(error)
            except Exception:
                logger.exception("a failure callback failed")

    def _token_ids(self, prompt: Sequence[Any]) -> list[int]:
        """The prompt in plain ints, which step plans can carry to other processes."""
        if not len(prompt):
            raise InvalidRequestError("prompt", "is empty")
        token_ids = []
        for place, token in enumerate(prompt):
            try:
                token_id = operator.index(token)
            except TypeError:
                raise InvalidRequestError(f"prompt[{place}]", f"{token!r} is no token id") from None
            if not 0 <= token_id < self._vocab:
                raise InvalidRequestError(
                    f"prompt[{place}]", f"token id {token_id} is not in [0, {self._vocab - 1}]"
                )
            token_ids.append(token_id)
        return token_ids

    def _check_tokens(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError where biases or the grammar do not fit the vocabulary."""
        for token_id in params.logit_bias:
            if token_id >= self._vocab:
                raise InvalidRequestError(
                    "logit_bias", f"token id {token_id} is not in [0, {self._vocab - 1}]"
                )
        if params.grammar is None:
            return
        try:
            mask = np.asarray(params.grammar.mask())
        except Exception as error:
            raise InvalidRequestError("grammar", str(error)) from error
        words = -(-self._vocab // 32)
        if mask.dtype != np.uint32 or mask.shape != (words,):
            raise InvalidRequestError(
                "grammar", f"its mask is {mask.dtype} {mask.shape}, not uint32 ({words},)"
            )

    def _raise_unless_ready(self) -> None:
        if self._failure is not None:
            # A new one for everybody: an error that is raised again and again keeps every stack.
            raise EngineFailedError(str(self._failure))
        if self._status == "draining":
            raise DrainingError("the server is shutting down and takes no new requests")
        if self._status != "ready":
            raise EngineFailedError(f"the engine is {self._status}")

    def _add(self, request: Request) -> list[TokenOutput]:
        with self._wake:
            self._queued -= 1
        try:
            self.scheduler.add(request)
        except (InvalidRequestError, OverloadedError) as error:
            return [
                TokenOutput(request_id=request.request_id, finish_reason="error", error=str(error))
            ]
        return []

    def _run(self) -> None:
        try:
            while self._status in ("ready", "draining"):
                self._last_turn = time.monotonic()
                self._take_commands()
                self._step()
        except EngineFailedError as error:
            self.fail(self._explain(error))
        except Exception as error:
            logger.exception("step loop")
            failure = EngineFailedError(f"step loop: {error!r} after {self.driver.position()}")
            self.fail(self._explain(failure))

    def _step(self) -> None:
        """One boundary: plan idle lanes, enqueue until a lane leaves, read what is one step old."""
        driver = self.driver
        plans = [p for lane in driver.idle_lanes if (p := self.scheduler.plan(lane)) is not None]
        self._note_admitted()
        if plans or driver.active:
            measured = self._watch is not None and self._watch.next()
            if self._broadcast is not None:
                self._broadcast(plans, measured)
            for plan in plans:
                driver.begin(plan)
            finished = driver.advance()
            self._garbage.worked()
            self._in_flight.append(finished.plan)
            self._results.read(finished)
            self._land_until(finished.plan)
        elif self._in_flight:
            self._land_one()
        else:
            if self._watch is not None:
                self._watch.idle()
            self._sleep()

    def _note_admitted(self) -> None:
        """Who was let in has waited until now."""
        if admitted := self.scheduler.take_admitted():
            now = time.monotonic()
            for sequence in admitted:
                sequence.queue_seconds = now - sequence.request.arrival

    def _land_until(self, newest: StepPlan) -> None:
        """Reads results until only the newest step of its lane is still unread."""
        while self._results.ready() or any(
            plan.lane == newest.lane and plan.number != newest.number for plan in self._in_flight
        ):
            self._land_one()

    def _land_one(self) -> None:
        """Waits for the oldest step's tokens and hands them out."""
        plan, result = self._results.take(
            self.deployment.cluster.step_seconds, lambda: self._failure
        )
        if plan.number != self._in_flight.popleft().number:
            raise EngineFailedError(f"step {plan.number} landed out of order")
        self._deliver(self.scheduler.complete(plan, result))

    def _take_commands(self) -> None:
        while self._commands:
            with self._wake:
                command = self._commands.popleft()
            self._deliver(command())
        if self._deadlines:
            now = time.monotonic()
            with self._wake:
                late = [request_id for request_id, at in self._deadlines.items() if at <= now]
            for request_id in late:
                self._deliver(self.scheduler.cancel(request_id))

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            callback = self._open.get(output.request_id)
            if output.finish_reason is not None:
                with self._wake:
                    callback = self._open.pop(output.request_id, None)
                    self._deadlines.pop(output.request_id, None)
                    self._grammars.pop(output.request_id, None)
                    if not self._open:
                        self._wake.notify_all()
            if callback is None:
                continue
            try:
                callback(output)
            except Exception:
                logger.exception("request %s: its receiver failed", output.request_id)
                self.cancel(output.request_id)

    def _sleep(self) -> None:
        """Nothing to do: check the books, collect garbage, then wait for a command."""
        self.scheduler.check_integrity()
        self._garbage.idle()
        with self._wake:
            if not self._commands and self._status in ("ready", "draining"):
                self._wake.wait(IDLE_SECONDS)
