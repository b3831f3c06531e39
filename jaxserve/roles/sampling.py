"""The end of a step: programs for options of requests, and the state of lanes between steps.

The programs run after the last program of a step that has a request with options, and read its
results. Other steps do not pay for penalties, biases, masks or log-probabilities, and every
executable keeps its shapes.

`TokenLanes` holds each lane's last tokens, drafts and token counts (for penalties) on the mesh that
has embedding and head; the plan decides which sequence they belong to. The workers with the head
call `begin` before the programs of a step and `end` after them, and `keep` with the drafts that
prediction modules then make.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxserve.mesh import zeros_of
from jaxserve.model import sampler
from jaxserve.model.attention.batch import positions
from jaxserve.model.module import all_columns
from jaxserve.roles.compilation import REPLICATED, ROWS, Arrays, Get, Program
from jaxserve.roles.drafting import DraftingExecutables, PromptLookup, StepEnd
from jaxserve.roles.layout import MAX_LOGPROBS, Bucket
from jaxserve.roles.step_arrays import (
    FROM_DEVICE,
    UNWANTED,
    BatchLayout,
    RulesLayout,
    rules_array,
    targets_array,
    wanted_array,
)
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import (
    GroupPut,
    TokenPrograms,
    drawn_tokens,
    sampled_rows,
    sampler_state,
)
from jaxserve.roles.weights import Leaves
from pallas_kernels.target import by_platform

FLOATS = ("repetition", "presence", "frequency", "biases")


def choose(programs: TokenPrograms, bucket: Bucket) -> Program:
    """(logits, last_tokens, batch, counts, rules) → (last_tokens, sampled, counts), and with drafts
    the lengths as `TokenPrograms.draw` gives them.

    Draws by the rules; slots without rules get the token that the step's last program drew.
    `last_tokens` are those before the step. The counts before a draft include the drafts before it;
    the counts that stay include accepted drafts only.
    """
    drafts = bucket.drafts
    layout = RulesLayout(programs.config.vocab)
    groups, slots = programs.groups, programs.slots

    def body(logits: Array, last: Array, batch: Array, counts: Array, rules: Array) -> object:
        fields = BatchLayout(bucket.tokens, slots).fields(batch[0])
        slot, position, _ = positions(fields["query_start"], fields["kv_length"], bucket.tokens)
        token_ids = fields["token_ids"]
        token_ids = jnp.where(token_ids == FROM_DEVICE, last[0][slot], token_ids)
        ruled, logits = layout.fields(rules[0]), all_columns(logits, programs.config.vocab)
        fields["temperature"] = ruled.pop("temperature")[:, 0]
        parsed = _rules(ruled)
        if not drafts:
            with jax.named_scope("count"):
                counts = sampler.count(counts, parsed, token_ids, slot, position)

            def draw(state: sampler.SamplerState, *ruled: Any) -> Int[Array, " rows"]:
                with jax.named_scope("adjust"):
                    adjusted = sampler.adjust(*ruled)
                return drawn_tokens(adjusted, state, programs.config.vocab)

            samples, state = fields["sample"] > 0, sampler_state(fields)
            drawn = _of_rows(samples, draw, (state, logits, counts, parsed))
            last = jnp.where(samples, drawn, last[0])[None]
            return last, programs.of_all_groups(last[0]), counts
        drafted = jnp.maximum(fields["sample"] - 1, 0)
        row = jnp.arange(bucket.tokens, dtype=jnp.int32)
        certain = jnp.where(row < (fields["query_start"][1:] - drafted)[slot], position, -1)
        with jax.named_scope("count"):
            counts = sampler.count(counts, parsed, token_ids, slot, certain)
        draft = token_ids[sampled_rows(fields, 1 + drafts)]  # [slots, 1 + drafts], from place 1 on
        each = jnp.arange(slots, dtype=jnp.int32)
        own = parsed._replace(fresh=jnp.zeros_like(parsed.fresh))

        def add(counts: Array, place: Array, most: Array) -> Array:
            """Counts the slots' drafts in this place, where it is not beyond `most`."""
            fed = (place > 0) & (place <= most)
            start = fields["kv_length"] - drafted
            at = jnp.where(fed, start + place - 1, -1)
            return sampler.count(counts, own, draft[:, place], each, at)

        def one(counts: Array, place: Array) -> tuple[Array, Array]:
            counts = add(counts, place, drafted)
            return counts, sampler.adjust(by_place[place], counts, parsed)

        with jax.named_scope("adjust"):
            places = jnp.arange(1 + drafts, dtype=jnp.int32)
            by_place = logits.reshape(slots, 1 + drafts, -1).swapaxes(0, 1)
            _, adjusted = jax.lax.scan(one, counts, places)
            logits = adjusted.swapaxes(0, 1).reshape(slots * (1 + drafts), -1)
        last, sampled, lengths = programs.draw(logits, last, fields, drafts)
        held = drafted - (fields["kv_length"] - lengths[0])
        with jax.named_scope("count"):
            counts, _ = jax.lax.scan(lambda c, place: (add(c, place, held), None), counts, places)
        return last, sampled, counts, lengths

    last, batch, _ = programs.step_shapes(bucket)
    rows = groups * slots
    lengths = [ROWS] if drafts else []
    return Program(
        "choose",
        body,
        programs.mesh,
        (
            programs.logits_shape(rows * (1 + drafts)),
            last,
            batch,
            programs.shape(rows, programs.config.vocab),
            programs.shape(groups, slots, layout.width),
        ),
        (ROWS, REPLICATED, ROWS, *lengths),
        donates=(3,),
        cuda_graphs="branches",
    )


def logprobs(programs: TokenPrograms, bucket: Bucket) -> Program:
    """(logits, sampled, wanted) → log-probabilities of the sampled tokens, `[groups, slots, …]`; in
    steps with drafts `[groups, slots, 1 + drafts, …]`. `wanted` is `step_arrays.wanted_array`; its
    other slots get zeros."""
    groups, slots, drafts = programs.groups, programs.slots, bucket.drafts
    shape = (groups, slots, 1 + drafts) if drafts else (groups, slots)

    def body(logits: Array, sampled: Array, wanted: Array) -> Array:
        token_ids = sampled[jax.lax.axis_index("dp")]
        every = all_columns(logits, programs.config.vocab)
        ids = jnp.repeat(wanted[0], 1 + drafts, axis=0)
        chosen = (ids[:, 0] > UNWANTED) & (token_ids.reshape(-1) >= 0)
        own = every, jnp.maximum(token_ids.reshape(-1), 0), ids
        packed = _of_rows(chosen, _packed, own)
        return jax.lax.all_gather(packed.reshape(*token_ids.shape, -1), "dp")

    return Program(
        "logprobs",
        body,
        programs.mesh,
        (
            programs.logits_shape(groups * slots * (1 + drafts)),
            programs.shape(*shape, spec=REPLICATED),
            programs.shape(groups, slots, MAX_LOGPROBS),
        ),
        REPLICATED,
    )


def score(programs: TokenPrograms, bucket: Bucket) -> Program:
    """(targets, stream…, head…) → log-probabilities of the targets, `[groups, tokens, …]`.

    The head runs over as many rows at a time as it does for sampling.
    """
    head, slots, tokens = programs.templates.head, programs.slots, bucket.tokens

    def body(targets: Array, stream: Arrays, leaves: Arrays) -> Array:
        x, block = programs.stream(stream), head.merge(leaves)
        missing = -tokens % slots
        rows = jnp.pad(x, ((0, missing), (0, 0))).reshape(-1, slots, x.shape[1])
        wanted = jnp.pad(targets[0], (0, missing)).reshape(-1, slots)
        packed = jax.lax.map(lambda part: _packed(block(part[0]), part[1]), (rows, wanted))
        return jax.lax.all_gather(packed.reshape(-1, packed.shape[2])[:tokens], "dp")

    return Program(
        "score",
        body,
        programs.mesh,
        (
            programs.shape(programs.groups, tokens),
            programs.stream_shapes(bucket),
            *programs.leaves(head),
        ),
        REPLICATED,
    )


def counts_shape(programs: TokenPrograms) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a lane's token counts, `[groups * slots, vocab]`."""
    return programs.shape(programs.groups * programs.slots, programs.config.vocab)


def _packed(
    logits: Float[Array, "rows vocab"],
    token_ids: Int[Array, " rows"],
    wanted: Int[Array, "rows wanted"] | None = None,
) -> Int[Array, "rows width"]:
    """Packs for each row the token's log-probability, the likeliest tokens or those `wanted`, and
    their log-probabilities; floats as bits."""
    top = min(MAX_LOGPROBS, logits.shape[1])
    logs, ids, best = sampler.log_probabilities(logits, token_ids, top, wanted)

    def bits(values: Array) -> Array:
        return jax.lax.bitcast_convert_type(values, jnp.int32)

    return jnp.concatenate([bits(logs)[:, None], ids.astype(jnp.int32), bits(best)], axis=1)


def _of_rows(
    chosen: Bool[Array, " rows"], compute: Callable[..., Array], arrays: tuple[Any, ...]
) -> Array:
    """Returns `compute(*arrays)`, a row for each of theirs. CPUs compute the chosen rows alone, one
    by one, so that copies of a row stay in a core's caches; the others get zeros."""

    def window(start: Array, mine: Array, found: Array) -> Array:
        def cut(array: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(array, start, mine.size)

        return sampler.replace_rows(found, start, mine, compute(*jax.tree.map(cut, arrays)))

    def one_by_one() -> Array:
        form = jax.eval_shape(compute, *arrays)
        return sampler.over_rows(chosen, window, jnp.zeros(form.shape, form.dtype))

    return by_platform(cpu=one_by_one, default=lambda: compute(*arrays))


def _rules(fields: dict[str, Array]) -> sampler.LogitRules:
    for name in FLOATS:
        fields[name] = jax.lax.bitcast_convert_type(fields[name], jnp.float32)
    return sampler.LogitRules(
        **{name: field[:, 0] if field.shape[1] == 1 else field for name, field in fields.items()}
    )


class SamplingExecutables(NamedTuple):
    """The sampling programs of one bucket, each under the name of its function."""

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
        get(choose, tokens), get(logprobs, any_step), get(score, tokens.undrafted)
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
    `sampling.py`; None if no request asked."""
    scores: jax.Array | None = None
    """int32 [groups, tokens, …]: log-probabilities of prompt tokens, packed likewise."""


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
