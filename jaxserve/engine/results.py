"""Reads sampled tokens off the device, on a thread of its own, so that the step loop waits with a
deadline and never inside JAX. Results come in the order of the steps."""

import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from jaxserve.errors import EngineFailedError
from jaxserve.pipeline.driver import Finished
from jaxserve.pipeline.plan import StepPlan

Sampled = list[list[int]]


class ResultReader:
    """A thread that waits for arrays; `read` hands it a step, `take` gives the tokens."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self._landed: queue.SimpleQueue[tuple[StepPlan, Sampled | Exception]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="jaxserve-results", daemon=True).start()

    def read(self, finished: Finished) -> None:
        """Starts the copy of a step's tokens to the host; returns at once."""
        if finished.sampled is not None:
            finished.sampled.copy_to_host_async()
        self._steps.put(finished)

    def close(self) -> None:
        """Ends the thread after what it was handed."""
        self._steps.put(None)

    def ready(self) -> bool:
        """Whether `take` would return at once."""
        return not self._landed.empty()

    def take(
        self, timeout: float, failed: Callable[[], EngineFailedError | None]
    ) -> tuple[StepPlan, Sampled]:
        """The oldest step's tokens, `[group][slot]`.

        Raises:
          EngineFailedError: they did not come within `timeout` seconds, the computation failed, or
            `failed` says meanwhile that the engine has.
        """
        end = time.monotonic() + timeout
        while True:
            try:
                plan, sampled = self._landed.get(timeout=min(0.5, timeout))
                break
            except queue.Empty:
                if (failure := failed()) is not None:
                    raise failure from None
                if time.monotonic() >= end:
                    raise EngineFailedError(
                        f"a step's tokens did not arrive within {timeout:.1f} s"
                    ) from None
        if isinstance(sampled, Exception):
            raise EngineFailedError(f"step {plan.number} of lane {plan.lane}: {sampled}")
        return plan, sampled

    def _run(self) -> None:
        while True:
            finished = self._steps.get()
            if finished is None:
                return
            try:
                array = finished.sampled
                assert array is not None
                sampled = np.asarray(array.addressable_data(0)).tolist()
            except Exception as error:
                sampled = error
            self._landed.put((finished.plan, sampled))
