"""What runs after a step's last program where a request of the step asks for more than a token.

Both drivers call it at the end of every step. It holds each lane's token counts (for penalties) on
the device; which sequence they belong to is the plan's business.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.mesh import cached_sharding, sharded_zeros
from jaxserve.pipeline.plan import StepPlan, rules_array, targets_array
from jaxserve.programs import ROWS, AFDPrograms, ColocatedPrograms
from jaxserve.programs.sampling import counts_shape


class SamplingExecutables(NamedTuple):
    """Of one bucket. None where the attention mesh is elsewhere."""

    choose: jax.stages.Compiled | None
    logprobs: jax.stages.Compiled | None
    score: jax.stages.Compiled | None


class Finished(NamedTuple):
    """A step that has been enqueued to its end."""

    plan: StepPlan
    sampled: jax.Array | None
    """int32 [groups, slots], replicated over the attention mesh; None in processes without it."""
    logits: jax.Array | None
    """FP32 [groups * slots, vocab]; rows of slots that did not sample mean nothing."""
    last: jax.Array
    """What this process computes last in the step: when it is there, so is everything before."""
    logprobs: jax.Array | None = None
    """int32 [groups, slots, …] as `programs.sampling` packs them; None where nobody asked."""
    scores: jax.Array | None = None
    """int32 [groups, tokens, …]: the same of prompt tokens."""


class Sampling:
    """Ends the steps of all lanes, in a process of the attention mesh.

    Args:
      programs: the deployment's.
      head: the head's leaves.
      put: puts an array `[groups, …]` on the attention mesh.
    """

    def __init__(
        self,
        programs: AFDPrograms | ColocatedPrograms,
        head: Sequence[jax.Array],
        put: Callable[[np.ndarray], jax.Array],
    ):
        counts = counts_shape(programs)
        sharding = cached_sharding(programs.meshes.attention, ROWS)
        self._counts = [
            sharded_zeros(counts.shape, counts.dtype, sharding)
            for _ in range(programs.deployment.lanes)
        ]
        self._slots, self._vocab = programs.slots, programs.config.vocab
        self._head, self._put = head, put

    def finish(
        self,
        plan: StepPlan,
        executables: SamplingExecutables,
        batch: jax.Array,
        before: jax.Array,
        left: tuple[jax.Array, jax.Array, jax.Array],
        stream: Sequence[jax.Array],
    ) -> tuple[jax.Array, Finished]:
        """The lane's last tokens, and the step with everything that was asked for.

        Args:
          plan, batch: the step, and its array.
          before: the lane's last tokens before the step.
          left: last tokens, sampled tokens and logits, as the step's last program left them.
          stream: what holds the residual stream after the last layer.
        """
        last, sampled, logits = left
        logprobs = scores = None
        if plan.has_rules:
            rules = self._put(rules_array(plan, self._slots, self._vocab))
            last, sampled, self._counts[plan.lane] = executables.choose(  # type: ignore[misc]
                logits, before, batch, self._counts[plan.lane], rules
            )
        if plan.has_logprobs:
            logprobs = executables.logprobs(logits, sampled)  # type: ignore[misc]
        if plan.has_targets:
            targets = self._put(targets_array(plan))
            scores = executables.score(targets, *stream, *self._head)  # type: ignore[misc]
        return last, Finished(plan, sampled, logits, sampled, logprobs, scores)
