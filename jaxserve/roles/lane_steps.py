"""Drives steps of which one dispatch runs all layers and lanes (`pipeline: step`).

Lanes whose steps have begun and have the same number of tokens go into one dispatch; `advance` then
hands out their results one by one.
"""

import abc
from collections.abc import Sequence

import jax

from jaxserve.roles.layout import Bucket
from jaxserve.roles.sampling import Finished
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import KVArrays
from jaxserve.roles.whole_steps import WholeSteps
from jaxserve.roles.worker import Passed


class StepPipeline(WholeSteps, abc.ABC):
    """Runs the steps of all lanes for this process's part.

    Attributes:
      executables: program of every dispatch, by bucket and number of lanes.
    """

    executables: dict[tuple[Bucket, int], jax.stages.Compiled]

    def advance(self) -> Finished | Passed:
        """Returns the next result of the latest dispatch; if none is left, dispatches first."""
        if not self._left:
            plans = self._take()
            for plan, made in zip(plans, self._run(plans), strict=True):
                self._left.append((plan, made))
                self._observe(plan, made)
        return self._left.popleft()[1]

    @abc.abstractmethod
    def _run(self, plans: Sequence[StepPlan]) -> Sequence[Finished | Passed]:
        """Enqueues these steps as one program."""

    @abc.abstractmethod
    def kv_arrays(self, domain: int = 0) -> KVArrays:
        """This process's pages, for hand-offs."""

    def _next(self) -> list[StepPlan]:
        size = self._begun[0].bucket.of_tokens
        return [plan for plan in self._begun if plan.bucket.of_tokens == size]
