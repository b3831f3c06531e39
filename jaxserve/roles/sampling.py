"""Runs the programs for options of requests at the end of a step.

Called by the workers that hold the head, at the end of every step. Holds each lane's token counts
(for penalties) on the device; the plan decides which sequence they belong to.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.mesh import sharded_zeros
from jaxserve.roles import sampling_programs
from jaxserve.roles.compilation import Get, ProgramKey
from jaxserve.roles.layout import Bucket
from jaxserve.roles.sampling_programs import counts_shape
from jaxserve.roles.step_arrays import rules_array, targets_array
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import TokenPrograms


class SamplingExecutables(NamedTuple):
    """The sampling programs of one bucket."""

    choose: jax.stages.Compiled
    logprobs: jax.stages.Compiled
    score: jax.stages.Compiled


def sampling_executables(
    programs: TokenPrograms, bucket: Bucket, get: Get
) -> SamplingExecutables | None:
    """The programs that run after a step with options; None for a small step: the scheduler gives
    requests with options larger ones."""
    if bucket.is_small(programs.slots):
        return None
    tokens, any_step = bucket.of_tokens, Bucket(1, 1, bucket.drafts)
    return SamplingExecutables(
        get(ProgramKey("choose", None, tokens), sampling_programs.choose, programs, bucket),
        get(
            ProgramKey("logprobs", None, any_step),
            *(sampling_programs.logprobs, programs, bucket.drafts),
        ),
        get(ProgramKey("score", None, tokens.undrafted), sampling_programs.score, programs, bucket),
    )


class Finished(NamedTuple):
    """A step that has been enqueued to its end."""

    plan: StepPlan
    sampled: jax.Array
    """int32 [groups, slots], replicated over the mesh. A step with drafts has [groups, slots,
    1 + drafts], with `REJECTED` behind the accepted tokens."""
    logits: jax.Array
    """FP32 [groups * slots, vocab]. A step with drafts has 1 + drafts rows a slot, a small step
    [groups * tokens, vocab]. Rows without sampling have no meaning."""
    last: jax.Array
    """The last result of the step in this process; all others are ready before it."""
    logprobs: jax.Array | None = None
    """int32 [groups, slots, …], in a step with drafts [groups, slots, 1 + drafts, …], as packed by
    `sampling_programs.py`; None if no request asked."""
    scores: jax.Array | None = None
    """int32 [groups, tokens, …]: log-probabilities of prompt tokens, packed likewise."""


class Sampling:
    """Ends the steps of all lanes.

    Args:
      programs: the deployment's.
      head: the head's leaves.
      put: puts an array `[groups, …]` on the mesh.
    """

    def __init__(
        self,
        programs: TokenPrograms,
        head: Sequence[jax.Array],
        put: Callable[[np.ndarray], jax.Array],
    ):
        counts = counts_shape(programs)
        self._counts = [
            sharded_zeros(counts.shape, counts.dtype, counts.sharding)
            for _ in range(programs.deployment.lanes)
        ]
        self._groups, self._slots = programs.groups, programs.slots
        self._vocab = programs.config.vocab
        self._head, self._put = head, put

    def finish(
        self,
        plan: StepPlan,
        executables: SamplingExecutables | None,
        batch: jax.Array,
        before: jax.Array,
        left: tuple[jax.Array, ...],
        stream: Sequence[jax.Array],
    ) -> tuple[jax.Array, Finished, Sequence[jax.Array]]:
        """Returns the lane's last tokens, the finished step with all results that were asked for,
        and in steps with drafts the lane's lengths.

        Args:
          plan, batch: the step, and its array.
          executables: programs of its bucket; None for a small bucket, whose steps have no options.
          before: the lane's last tokens before the step.
          left: results of the step's last program: last tokens, sampled tokens, logits, and with
            drafts lengths.
          stream: arrays that hold the residual stream after the last layer.
        """
        last, sampled, logits, *lengths = left
        logprobs = scores = None
        if executables is None:
            return last, Finished(plan, sampled, logits, sampled), lengths
        if plan.has_rules:
            rules = self._put(rules_array(plan, self._groups, self._slots, self._vocab))
            last, sampled, self._counts[plan.lane], *lengths = executables.choose(
                logits, before, batch, self._counts[plan.lane], rules
            )
        if plan.has_logprobs:
            logprobs = executables.logprobs(logits, sampled)
        if plan.has_targets:
            targets = self._put(targets_array(plan, self._groups, self._slots))
            scores = executables.score(targets, *stream, *self._head)
        return last, Finished(plan, sampled, logits, sampled, logprobs, scores), lengths
