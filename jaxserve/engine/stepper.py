"""Carries out what the loop decides next, on the engine's thread.

It tells the followers the plans of a boundary, has the driver enqueue stages until a lane has left
its step, waits for results with a deadline, and passes actions about pages to `HandOffs`.

The KV cache is donated to each step, so a step that fails on the devices loses it. Then all steps
are taken back, the driver gets empty pages, and the requests are computed anew from prompt and
tokens: no stream repeats or lacks a token. One process with both roles recovers in this way, at
most `MOST_LOST` times a minute. Otherwise the engine fails, and a router replays its requests.
"""

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from jax.errors import JaxRuntimeError

from jaxserve.clock import AwakeClock
from jaxserve.engine.loop import Await, Enqueue, Idle, Loop, PageAction
from jaxserve.engine.outputs import StepOutputs, StepResult, step_result
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.engine.runtime import Driver, IdleCollection
from jaxserve.errors import EngineFailedError, InvalidRequestError, JaxserveError, StepLostError
from jaxserve.link.pages.source import PagesLoad, PagesSource
from jaxserve.observe.spans import Span
from jaxserve.observe.watch import Watch
from jaxserve.roles.sampling import Finished
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.worker import Action, Counted, MovesExperts, PageOrder, lane_of_all

Command = Callable[[], Iterable[TokenOutput] | None]
"""Something to be done on the engine's thread, which delivers the outputs that it returns."""
Post = Callable[[Command], None]

OnHeld = Callable[[PagesSource | JaxserveError], None]
"""Called once with the place where a prompt's pages are held, or with the error."""

PREFILL_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class HandOffs:
    """Hand-offs of an engine that holds no prompts and fetches no pages."""

    @property
    def held(self) -> int:
        """Prompts whose pages are held."""
        return 0

    @property
    def load(self) -> PagesLoad | None:
        """Counters of this engine's ends of the link, from any thread; None without a link."""
        return None

    # ---------------------------------------------------------------- requests, from any thread
    def keep(self, request: Request) -> None:
        """Keeps the lease of a submitted request's source until the request's first output.

        Raises:
          InvalidRequestError: The request has a source, and this engine cannot fetch from it.
        """
        if request.source is not None and request.source.tokens:
            raise InvalidRequestError("source", "this engine has no link to prefill workers")

    def forget(self, request_id: str) -> None:
        """Releases the lease of a request that has its first output, or has ended."""

    def leave(self, request_id: str) -> None:
        """Stops renewing the lease of a request that another engine takes over."""

    def renew(self, hand_offs: Sequence[str]) -> None:
        """Begins leases anew. Unknown leases are ignored."""

    def told(self, request: Request, on_held: OnHeld) -> Callable[[TokenOutput], None]:
        """Returns the receiver of a prompt's outputs, which calls `on_held` at the last one.

        Raises:
          InvalidRequestError: This engine has no pages server.
        """
        raise InvalidRequestError("prefill", "this engine has no pages server")

    # ----------------------------------------------------- the loop's actions, engine's thread
    def carry_out(self, action: PageAction) -> None:
        """Carries out an action of the loop about pages; never waits."""
        raise AssertionError(f"no link for {type(action).__name__}")

    def close(self) -> None:
        """Ends the links."""


MOST_LOST = 3
"""Steps that may be lost within a minute."""
CHECKED_AT_ONCE = 1000
"""Pages or requests that checks in a pause look at before they ask for commands: a millisecond."""

logger = logging.getLogger(__name__)


class Followers(Protocol):
    """The other processes of a leader's runtime; implemented by `fleet.leading.LedFollowers`."""

    def broadcast(self, plans: list[StepPlan], measured: bool, actions: Sequence[Action]) -> None:
        """Sends a boundary to all followers, before the driver runs it."""

    def explain(self, error: EngineFailedError) -> EngineFailedError:
        """Finds the cause of a step's error, which is often a follower."""

    def measured(self, timeout: float) -> list[list[Span]]:
        """Returns the measurements of every follower's probe. Raises EngineFailedError."""

    def counts(self, number: int, timeout: float) -> Counted:
        """Returns the experts' token counts of that number. Raises EngineFailedError."""


POLL_SECONDS = 0.5
"""How often a waiting `take` looks whether the engine has failed meanwhile."""


class ResultReader:
    """A thread that reads sampled tokens off the device, so that the step loop waits with a
    deadline and never inside JAX. `read` hands it a step; `take` gives the tokens, step after step.

    Args:
      clock: seconds, monotonic. Time in which the process could not run is not counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self._complete: queue.SimpleQueue[tuple[StepPlan, StepResult | Exception]] = (
            queue.SimpleQueue()
        )
        self._waiting = 0
        self._thread = threading.Thread(target=self._run, name="jaxserve-results", daemon=True)
        self._thread.start()

    def read(self, finished: Finished) -> None:
        """Starts the copy of a step's tokens to the host; returns at once."""
        for array in (finished.sampled, finished.logprobs, finished.scores):
            if array is not None:
                array.copy_to_host_async()
        self._waiting += 1
        self._steps.put(finished)

    def drop(self, timeout: float, failed: Callable[[], EngineFailedError | None]) -> None:
        """Takes what steps gave that are lost, and passes it over.

        Raises:
          EngineFailedError: as `take`, but not where a computation failed.
        """
        while self._waiting:
            with contextlib.suppress(StepLostError):
                self.take(timeout, failed)

    def close(self, timeout: float = 10.0) -> None:
        """Ends the thread after what it was handed, and waits up to `timeout` seconds for it.

        A thread that is inside a device read when the interpreter ends would abort the process.
        """
        self._steps.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def ready(self) -> bool:
        """Whether `take` would return at once."""
        return not self._complete.empty()

    def take(
        self, timeout: float, failed: Callable[[], EngineFailedError | None]
    ) -> tuple[StepPlan, StepResult]:
        """The oldest step's tokens.

        Raises:
          StepLostError: the computation failed.
          EngineFailedError: they did not come within `timeout` seconds (`cluster.step_seconds`),
            or `failed` says meanwhile that the engine has.
        """
        awake = AwakeClock(2 * POLL_SECONDS, self._clock)
        while True:
            try:
                plan, result = self._complete.get(timeout=min(POLL_SECONDS, timeout))
                break
            except queue.Empty:
                if (failure := failed()) is not None:
                    raise failure from None
                if awake.tick() >= timeout:
                    raise EngineFailedError(
                        f"a step's tokens did not arrive within {timeout:.1f} s "
                        "(cluster.step_seconds)"
                    ) from None
        self._waiting -= 1
        if isinstance(result, Exception):
            raise StepLostError(f"step {plan.number} of lane {plan.lane}: {result}") from result
        return plan, result

    def _run(self) -> None:
        while True:
            finished = self._steps.get()
            if finished is None:
                return
            arrays = finished.sampled, finished.logprobs, finished.scores
            result: StepResult | Exception
            try:
                result = step_result(finished.plan, *map(_host, arrays))
            except Exception as error:
                result = error
            self._complete.put((finished.plan, result))


def _host(array: Any) -> Any:
    return None if array is None else np.asarray(array.addressable_data(0))


class Stepper:
    """Carries out one action after the other.

    Args:
      loop: decides them.
      driver: enqueues the steps.
      hand_offs: reads and writes pages; may be replaced before the first step.
      results: of the steps.
      step_seconds: how long a step may take.
      failure: why the engine failed; a wait for a result ends with it.
      interrupted: whether commands wait; checks of integrity end for them.
      followers: processes that run the same plans; None: this one is alone.
      watch: measures the pipeline; None: it is not measured.
      experts: moves experts, here or in the ffn runtime; None: experts never move.
    """

    def __init__(
        self,
        loop: Loop,
        driver: Driver,
        hand_offs: HandOffs,
        results: ResultReader,
        *,
        step_seconds: float,
        failure: Callable[[], EngineFailedError | None],
        interrupted: Callable[[], bool],
        followers: Followers | None,
        watch: Watch | None,
        experts: MovesExperts | None,
    ):
        self._loop, self._driver, self.hand_offs = loop, driver, hand_offs
        self._results = results
        self._step_seconds, self._failure, self._interrupted = step_seconds, failure, interrupted
        self._followers, self._watch, self._experts = followers, watch, experts
        self._orders: list[Action] = []  # that followers are to be told
        self._garbage = IdleCollection()
        self._lost: deque[float] = deque(maxlen=MOST_LOST)  # when steps were

    def completed(self) -> StepOutputs | None:
        """Returns the outputs of the oldest step in flight if its result has arrived, else None."""
        if not self._loop.in_flight or not self._results.ready():
            return None
        return self._unless_lost(self._complete)

    def step(self) -> StepOutputs | Idle | None:
        """Carries out the loop's next action.

        Returns:
          outputs of a step; `Idle`, on which the caller waits; or None.

        Raises:
          EngineFailedError: a result did not come in time, or a step was lost and its requests
            cannot be computed anew here.
        """
        return self._unless_lost(self._next)

    def _unless_lost[Done](self, work: Callable[[], Done]) -> Done | None:
        """Does it; begins all steps anew if one was lost."""
        try:
            return work()
        except StepLostError as error:
            self._begin_anew(error)
            return None

    def _next(self) -> StepOutputs | Idle | None:
        match self._loop.next(self._driver.idle_lanes):
            case Enqueue(steps):
                self._enqueue([step.plan for step in steps])
            case Await():
                return self._complete()
            case Idle(until) as idle:
                self._tidy_up(until)
                return idle
            case about_pages:
                self.hand_offs.carry_out(about_pages)
        return None

    def tell(self, order: PageOrder) -> None:
        """Has the followers read or write pages with this process: at once or, while a lane is
        inside a step, before the next stages that they enqueue."""
        assert self._followers is not None
        self._orders.append(order)
        if not self._driver.active:
            self._followers.broadcast([], False, self._orders)
            self._orders.clear()

    def _enqueue(self, plans: list[StepPlan]) -> None:
        """One boundary: followers hear of the plans, then stages until a lane leaves."""
        measured = self._watch is not None and self._watch.next()
        self._begin(plans, measured)
        try:
            for plan in plans:
                self._driver.begin(plan)
            finished = self._driver.advance()
        except JaxRuntimeError as error:
            raise StepLostError(f"{self._driver.position()}: {error}") from error
        assert isinstance(finished, Finished), "it has the head"
        self._garbage.worked()
        self._loop.enqueued(lane_of_all(finished.plan, len(self._loop.schedulers)))
        self._results.read(finished)

    def _begin(self, plans: list[StepPlan], measured: bool) -> None:
        """Announces a boundary to the followers; carries out the actions due before its plans."""
        actions = () if self._experts is None else self._experts.due()
        if self._followers is not None and (plans or actions or self._driver.active):
            self._followers.broadcast(plans, measured, [*self._orders, *actions])
            self._orders.clear()
        if self._experts is None or not actions:
            return
        slots = self._driver.slots
        if slots is not None:
            for action in actions:
                slots.carry_out(action)
        self._experts.carried_out(actions)

    def _complete(self) -> StepOutputs:
        """Waits for the oldest step's tokens."""
        plan, result = self._results.take(self._step_seconds, self._failure)
        lane = lane_of_all(plan, len(self._loop.schedulers))
        return self._loop.complete(lane, plan, result)

    def _begin_anew(self, error: StepLostError) -> None:
        """Takes all steps back and has their requests computed anew; raises the error if not."""
        now = time.monotonic()
        often = len(self._lost) == MOST_LOST and now - self._lost[0] < 60.0
        if self._followers is not None or self._loop.holds is not None or often:
            raise error
        if not self._driver.renew():
            raise error
        self._lost.append(now)
        # What lost steps still give must not meet the steps that are planned anew.
        self._results.drop(self._step_seconds, self._failure)
        self._loop.begin_anew()
        running = sum(scheduler.num_waiting for scheduler in self._loop.schedulers)
        logger.warning("a step was lost: %s; %d requests wait to be computed anew", error, running)

    def _tidy_up(self, until: float | None) -> None:
        """Nothing to do: checks the books, collects garbage, and moves experts. Checks end at a
        command or at `until`, and begin anew in the next pause."""
        if self._watch is not None:
            self._watch.idle()
        for scheduler in self._loop.schedulers:
            for _ in itertools.islice(scheduler.integrity(), 0, None, CHECKED_AT_ONCE):
                if self._interrupted() or (until is not None and time.monotonic() >= until):
                    return
        self._garbage.idle()
        self._begin([], measured=False)
