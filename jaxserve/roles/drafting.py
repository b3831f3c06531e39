"""Drafts on the device: what a lane's next step may refer to before the host knows it.

The workers that hold the head call `Drafting` around every step of a deployment with drafts: first
`resolve`, after sampling `end`, and with what a drafter proposes then, `keep`. Drafters are
`PromptLookup` here and the prediction modules, which run as layers of the workers. A draft that is
wrong, or stale, costs time and changes no token (`TokenPrograms.verify_step`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.mesh import cached_sharding, sharded_zeros
from jaxserve.roles import draft_programs
from jaxserve.roles.compilation import Get, ProgramKey
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import ROWS
from jaxserve.roles.sampling import Finished
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import TokenPrograms

_ANY = Bucket(1, 1)


class StepEnd(NamedTuple):
    """A step whose tokens are sampled; all arrays are on the attention mesh."""

    plan: StepPlan
    batch: jax.Array
    """Its array, with what only the device knew."""
    table: jax.Array
    stream: Sequence[jax.Array]
    """What holds the residual stream after the last layer (`TokenPrograms.stream`)."""
    sampled: jax.Array
    """As of `Finished`."""
    last: jax.Array
    """int32 [groups, slots]: every slot's last token, which is not in the cache."""
    lengths: jax.Array
    """int32 [groups, slots]: its tokens that are in the cache and hold."""
    drafts: jax.Array
    """int32 [groups, slots, drafts]: those of the step; they stay where a slot gets no others."""


class DraftingExecutables(NamedTuple):
    """The programs of one bucket. Without `PromptLookup`, where prediction modules make the drafts,
    its two are None."""

    resolve: jax.stages.Compiled
    draft: jax.stages.Compiled | None = None
    recall: jax.stages.Compiled | None = None


def drafting_executables(
    programs: TokenPrograms, bucket: Bucket, get: Get
) -> DraftingExecutables | None:
    """What a deployment with drafts runs beyond its steps; None for one without."""
    if not programs.deployment.drafts:
        return None
    tokens = bucket.of_tokens.undrafted
    resolve = get(ProgramKey("resolve", None, tokens), draft_programs.resolve, programs, tokens)
    if programs.config.modules:
        return DraftingExecutables(resolve)
    return DraftingExecutables(
        resolve,
        get(ProgramKey("draft", None, tokens), draft_programs.draft, programs, tokens),
        get(ProgramKey("recall", None, _ANY), draft_programs.recall, programs),
    )


class Drafting:
    """What every slot of every lane has come to, and what may come next.

    Args:
      programs: the deployment's.
      put: puts an array `[groups, …]` on the mesh.
    """

    def __init__(self, programs: TokenPrograms, put: Callable[[np.ndarray], jax.Array]):
        state = programs.groups, programs.slots
        lanes, drafts = programs.deployment.lanes, programs.deployment.drafts
        self._lengths = [put(np.zeros(state, np.int32)) for _ in range(lanes)]
        self._drafts = [put(np.zeros((*state, drafts), np.int32)) for _ in range(lanes)]
        self._lookup = None if programs.config.modules else PromptLookup(programs, put)

    def resolve(
        self, executables: DraftingExecutables, plan: StepPlan, batch: jax.Array, last: jax.Array
    ) -> jax.Array:
        """The step's batch array, complete."""
        lane = plan.lane
        if not plan.proposes and not plan.on_device:
            return batch
        if self._lookup is not None and plan.said:
            self._lookup.take_in(executables, plan)
        batch, self._lengths[lane] = executables.resolve(
            batch, last, self._lengths[lane], self._drafts[lane]
        )
        return batch

    def end(
        self,
        finished: Finished,
        batch: jax.Array,
        table: jax.Array,
        stream: Sequence[jax.Array],
        last: jax.Array,
        lengths: Sequence[jax.Array],
    ) -> StepEnd:
        """Returns the sampled step, from which drafters start.

        Args:
          lengths: as the program that verified the drafts says; empty where there were none.
        """
        plan, lane = finished.plan, finished.plan.lane
        if lengths:
            (self._lengths[lane],) = lengths
        return StepEnd(
            plan,
            batch,
            table,
            stream,
            finished.sampled,
            last,
            self._lengths[lane],
            self._drafts[lane],
        )

    def look_up(self, executables: DraftingExecutables, end: StepEnd) -> jax.Array:
        """int32 [groups, slots, drafts]: what `PromptLookup` proposes."""
        assert self._lookup is not None
        return self._lookup.draft(executables, end)

    def keep(self, finished: Finished, drafts: jax.Array) -> Finished:
        """The step; the lane's next one verifies these drafts."""
        self._drafts[finished.plan.lane] = drafts
        return finished._replace(last=drafts)


class PromptLookup:
    """The drafter without weights; keeps what every sequence has said."""

    def __init__(self, programs: TokenPrograms, put: Callable[[np.ndarray], jax.Array]):
        self._put = put
        self._groups, self._slots = programs.groups, programs.slots
        self._width = draft_programs.history_width(programs)
        shape = programs.groups, programs.slots, self._width
        sharding = cached_sharding(programs.mesh, ROWS)
        lanes = range(programs.deployment.lanes)
        self._said = [sharded_zeros(shape, np.dtype(np.int32), sharding) for _ in lanes]

    def take_in(self, executables: DraftingExecutables, plan: StepPlan) -> None:
        """Adds what the plan tells of sequences, as much at a time as the program takes."""
        assert executables.recall is not None
        words = draft_programs.recall_words(plan.said, self._groups, self._slots)
        at_once = draft_programs.RECALLED
        for start in range(0, words.shape[2], at_once):
            some = self._put(np.ascontiguousarray(words[:, :, start : start + at_once]))
            self._said[plan.lane] = executables.recall(self._said[plan.lane], some)

    def draft(self, executables: DraftingExecutables, end: StepEnd) -> jax.Array:
        """What followed where the last tokens came before."""
        lane = end.plan.lane
        assert executables.draft is not None
        self._said[lane], drafts = executables.draft(
            self._said[lane], end.batch, end.last, end.lengths
        )
        return drafts
