"""Reads sampled tokens off the device, on a thread of its own, so that the step loop waits with a
deadline and never inside JAX. Results come in the order of the steps."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.clock import AwakeClock
from jaxserve.engine.outputs import StepResult, step_result
from jaxserve.errors import EngineFailedError, StepLostError
from jaxserve.roles.sampling import Finished
from jaxserve.roles.step_plan import StepPlan

POLL_SECONDS = 0.5
"""How often a waiting `take` looks whether the engine has failed meanwhile."""


class ResultReader:
    """A thread that waits for arrays; `read` hands it a step, `take` gives the tokens.

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
