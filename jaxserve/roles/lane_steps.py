"""Drives steps of which one dispatch runs all layers and lanes (`pipeline: step`).

Lanes whose steps have begun and have the same number of tokens go into one dispatch; `advance` then
hands out their results one by one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec

from jaxserve.roles.compilation import Get
from jaxserve.roles.drafting import drafting_executables
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import Arrays
from jaxserve.roles.sampling import Finished, sampling_executables
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_lanes import TokenLanes
from jaxserve.roles.token_programs import TokenPrograms
from jaxserve.roles.whole_steps import WholeSteps
from jaxserve.roles.worker import Passed


def options(programs: TokenPrograms, buckets: Sequence[Bucket], get: Get) -> dict[Bucket, Any]:
    """Collects the programs for the options of requests, and those that draft, of each bucket."""
    makes = sampling_executables, drafting_executables
    return {bucket: tuple(make(programs, bucket, get) for make in makes) for bucket in buckets}


class StepPipeline(WholeSteps):
    """Runs the steps of all lanes for this process's part.

    Attributes:
      executables: program of every dispatch, by bucket and number of lanes.
    """

    executables: dict[tuple[Bucket, int], jax.stages.Compiled]
    _ends: dict[Bucket, Any]
    _tokens: TokenLanes
    _step: Callable[[Bucket, Sequence[Arrays]], Sequence[tuple[Arrays, Arrays]]]
    """Enqueues a program for lanes, each with its last tokens, batch and page table. Returns the
    results of each lane: those of the step's end, and the arrays of its residual stream."""

    def advance(self) -> Finished | Passed:
        """Returns the next result of the latest dispatch; if none is left, dispatches first."""
        if not self._left:
            plans = self._take()
            for plan, made in zip(plans, self._run(plans), strict=True):
                self._left.append((plan, made))
                self._observe(plan, made)
        return self._left.popleft()[1]

    def _run(self, plans: Sequence[StepPlan]) -> Sequence[Finished | Passed]:
        """Enqueues these steps as one program, with what comes before and after it."""
        bucket = max((plan.bucket for plan in plans), key=lambda bucket: bucket.pages)
        (*_, sampling, drafting), steps, finished = self._ends[bucket], [], []
        for plan in plans:
            batch, table = self._tokens.put(msgspec.structs.replace(plan, bucket=bucket))
            steps.append((*self._tokens.begin(plan, drafting, batch), table))
        for plan, arrays, made in zip(plans, steps, self._step(bucket, steps), strict=True):
            end = self._tokens.end(plan, (sampling, drafting), arrays, *made)
            finished.append(end[0])
        return finished

    def _next(self) -> list[StepPlan]:
        size = self._begun[0].bucket.of_tokens
        return [plan for plan in self._begun if plan.bucket.of_tokens == size]
