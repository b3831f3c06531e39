"""Reads sampled tokens off the device, on a thread of its own, so that the step loop waits with a
deadline and never inside JAX. Results come in the order of the steps."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.engine.logprobs import StepResult, step_result
from jaxserve.errors import EngineFailedError
from jaxserve.pipeline.plan import StepPlan
from jaxserve.pipeline.sampling import Finished


class ResultReader:
    """A thread that waits for arrays; `read` hands it a step, `take` gives the tokens."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self._landed: queue.SimpleQueue[tuple[StepPlan, StepResult | Exception]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="jaxserve-results", daemon=True).start()

    def read(self, finished: Finished) -> None:
        """Starts the copy of a step's tokens to the host; returns at once."""
        for array in (finished.sampled, finished.logprobs, finished.scores):
            if array is not None:
                array.copy_to_host_async()
        self._steps.put(finished)

    def close(self) -> None:
        """Ends the thread after what it was handed."""
        self._steps.put(None)

    def ready(self) -> bool:
        """Whether `take` would return at once."""
        return not self._landed.empty()

    def take(
        self, timeout: float, failed: Callable[[], EngineFailedError | None]
    ) -> tuple[StepPlan, StepResult]:
        """The oldest step's tokens.

        Raises:
          EngineFailedError: they did not come within `timeout` seconds, the computation failed, or
            `failed` says meanwhile that the engine has.
        """
        end = time.monotonic() + timeout
        while True:
            try:
                plan, result = self._landed.get(timeout=min(0.5, timeout))
                break
            except queue.Empty:
                if (failure := failed()) is not None:
                    raise failure from None
                if time.monotonic() >= end:
                    raise EngineFailedError(
                        f"a step's tokens did not arrive within {timeout:.1f} s"
                    ) from None
        if isinstance(result, Exception):
            raise EngineFailedError(f"step {plan.number} of lane {plan.lane}: {result}")
        return plan, result

    def _run(self) -> None:
        while True:
            finished = self._steps.get()
            if finished is None:
                return
            result: StepResult | Exception
            try:
                result = _result(finished)
            except Exception as error:
                result = error
            self._landed.put((finished.plan, result))


def _result(finished: Finished) -> StepResult:
    assert finished.sampled is not None
    logprobs, scores = finished.logprobs, finished.scores
    return step_result(
        finished.plan,
        _host(finished.sampled),
        None if logprobs is None else _host(logprobs),
        None if scores is None else _host(scores),
    )


def _host(array: Any) -> np.ndarray:
    return np.asarray(array.addressable_data(0))
