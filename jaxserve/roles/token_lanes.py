"""State of every lane on the mesh that has embedding and head, between the lane's steps.

The workers with the head call `begin` before the programs of a step and `end` after them, and
`keep` with the drafts that prediction modules then make.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxserve.mesh import zeros_of
from jaxserve.roles.drafting import DraftingExecutables, PromptLookup, StepEnd
from jaxserve.roles.sampling import Finished, SamplingExecutables, counts_shape
from jaxserve.roles.step_arrays import rules_array, targets_array, wanted_array
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import GroupPut, TokenPrograms
from jaxserve.roles.weights import Leaves


class TokenLanes:
    """Last tokens, token counts, cache lengths and drafts of all lanes, on the device.

    Args:
      head: leaves of the head.
      own: makes an array of the programs' mesh from one of a step's logits or residual stream.

    Attributes:
      put: makes the arrays of each step; called once a plan, in order.
    """

    def __init__(
        self,
        programs: TokenPrograms,
        head: Leaves,
        own: Callable[[jax.Array], jax.Array] = lambda array: array,
    ):
        self._own = own
        self.put, lanes = GroupPut(programs), range(programs.deployment.lanes)
        state, put = (programs.groups, programs.slots), self.put.rows
        self._programs, self._head, self._lookup = programs, head, None
        self._last = [put(np.zeros(state, np.int32)) for _ in lanes]
        self._counts = zeros_of([counts_shape(programs)] * len(lanes))
        if drafts := programs.deployment.drafts:
            self._lengths = [put(np.zeros(state, np.int32)) for _ in lanes]
            self._drafts = [put(np.zeros((*state, drafts), np.int32)) for _ in lanes]
            self._lookup = None if programs.config.modules else PromptLookup(programs, put)

    def begin(
        self, plan: StepPlan, drafting: DraftingExecutables | None, batch: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the lane's last tokens; and the batch array, in deployments with drafts with
        every `FROM_DEVICE` replaced."""
        lane, before = plan.lane, self._last[plan.lane]
        if drafting is not None and (plan.proposes or plan.on_device):
            if self._lookup is not None and plan.said:
                self._lookup.take_in(drafting, plan)
            batch, self._lengths[lane] = drafting.resolve(
                batch, before, self._lengths[lane], self._drafts[lane]
            )
        return before, batch

    def end(
        self,
        plan: StepPlan,
        programs: tuple[SamplingExecutables | None, DraftingExecutables | None],
        arrays: tuple[jax.Array, jax.Array, jax.Array],
        left: tuple[jax.Array, ...],
        stream: Sequence[jax.Array],
    ) -> tuple[Finished, StepEnd | None]:
        """Runs the options of requests, and looks up drafts for the lane's next step.

        Args:
          programs: those of the step's bucket. A small bucket has none for sampling, since its
            steps have no options.
          arrays: the lane's last tokens before the step, its batch array and its page table.
          left: results of the step's last program: last tokens, sampled tokens, logits, and with
            drafts lengths.
          stream: arrays that hold the residual stream after the last layer.

        Returns:
          the finished step, and what prediction modules need to draft; None: no drafts are wanted.
        """
        (sampling, drafting), (before, batch, table) = programs, arrays
        last, sampled, logits, *lengths = left
        if sampling is not None and (plan.has_rules or plan.has_logprobs):
            logits = self._own(logits)
        if (sampling is not None and plan.has_targets) or (drafting is not None and plan.proposes):
            stream = [self._own(each) for each in stream]
        logprobs = scores = None
        shape, put = (self._programs.groups, self._programs.slots), self.put.rows
        if sampling is not None and plan.has_rules:
            rules = put(rules_array(plan, *shape, self._programs.config.vocab))
            last, sampled, self._counts[plan.lane], *lengths = sampling.choose(
                logits, before, batch, self._counts[plan.lane], rules
            )
        if sampling is not None and plan.has_logprobs:
            logprobs = sampling.logprobs(logits, sampled, put(wanted_array(plan, *shape)))
        if sampling is not None and plan.has_targets:
            scores = sampling.score(put(targets_array(plan, *shape)), *stream, *self._head)
        finished = Finished(plan, sampled, logits, sampled, logprobs, scores)
        self._last[plan.lane] = last
        if drafting is None or not plan.proposes:
            return finished, None
        if lengths:
            (self._lengths[plan.lane],) = lengths
        kept = self._lengths[plan.lane], self._drafts[plan.lane]
        end = StepEnd(plan, batch, table, stream, finished.sampled, last, *kept)
        if self._lookup is not None:
            finished = self.keep(finished, self._lookup.draft(drafting, end))
        return finished, end

    def keep(self, finished: Finished, drafts: jax.Array) -> Finished:
        """Stores the drafts for the lane's next step to verify, and returns the step."""
        self._drafts[finished.plan.lane] = drafts
        return finished._replace(last=drafts)
