"""Programs for what only some requests ask of a step, on the attention mesh.

They run after the step's own last program, in steps that have such a request, and read what it left
behind. So nobody else pays for penalties, biases, masks or log-probabilities, and every executable
keeps its shapes. `roles/sampling.py` runs them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.mesh import ATTENTION_RULES
from jaxserve.model.attention.batch import positions
from jaxserve.model.sampler import Rules, adjust, count, log_probabilities
from jaxserve.roles.layout import (
    FROM_DEVICE,
    MAX_LOGPROBS,
    REJECTED,
    BatchLayout,
    Bucket,
    RulesLayout,
)
from jaxserve.roles.program import (
    REPLICATED,
    ROWS,
    Program,
    TokenPrograms,
    drawn_tokens,
    sampler_state,
)

FLOATS = ("repetition", "presence", "frequency", "biases")


def choose(programs: TokenPrograms, bucket: Bucket) -> Program:
    """(logits, last_tokens, batch, counts, rules) → (last_tokens, sampled, counts).

    Draws by the rules; in slots without any, what the step's own last program would have drawn.
    `last_tokens` are those before the step. With drafts both are those after it, as `sampled`
    follows them among the arguments: slots that had drafts, which have no rules, keep theirs.
    """
    layout = RulesLayout(programs.config.vocab)
    groups, slots = programs.groups, programs.slots

    def body(logits: Array, last: Array, batch: Array, *rest: Array) -> object:
        *sampled, counts, rules = rest
        fields = BatchLayout(bucket.tokens, slots).fields(batch[0])
        slot, position, _ = positions(fields["query_start"], fields["kv_length"], bucket.tokens)
        token_ids = fields["token_ids"]
        token_ids = jnp.where(token_ids == FROM_DEVICE, last[0][slot], token_ids)
        ruled = layout.fields(rules[0])
        fields["temperature"] = ruled.pop("temperature")[:, 0]
        parsed = _rules(ruled)
        with jax.named_scope("count"):
            counts = count(counts, parsed, token_ids, slot, position)
        with jax.named_scope("adjust"):
            logits = adjust(logits, counts, parsed)
        if not bucket.drafts:
            return *programs.draw(logits, last, fields), counts
        drawn = drawn_tokens(logits, sampler_state(fields))
        alone = fields["sample"] == 1
        last = jnp.where(alone, drawn, last[0])[None]
        first = jax.lax.all_gather(jnp.where(alone, drawn, REJECTED), "dp")
        runs = sampled[0]
        first = jnp.where(first == REJECTED, runs[:, :, 0], first)
        return last, runs.at[:, :, 0].set(first), counts

    shapes = programs.step_shapes(bucket)
    rows = groups * slots
    runs = [programs.shape(groups, slots, 1 + bucket.drafts)] if bucket.drafts else []
    return Program(
        "choose",
        body,
        programs.mesh,
        (
            programs.shape(rows, programs.config.vocab, dtype=jnp.float32),
            *shapes[:2],
            *runs,
            programs.shape(rows, programs.config.vocab),
            programs.shape(groups, slots, layout.width),
        ),
        (*(ROWS,) * 3, *[REPLICATED] * len(runs), ROWS, ROWS),
        (ROWS, REPLICATED, ROWS),
        donated=(3 + len(runs),),
    )


def logprobs(programs: TokenPrograms, drafts: int) -> Program:
    """(logits, sampled) → log-probabilities of the sampled tokens, `[groups, slots, …]`; in steps
    with drafts of the first one of every slot."""
    groups, slots, vocab = programs.groups, programs.slots, programs.config.vocab
    shape = (groups, slots, 1 + drafts) if drafts else (groups, slots)

    def body(logits: Array, sampled: Array) -> Array:
        token_ids = sampled[jax.lax.axis_index("dp")]
        if drafts:
            token_ids = jnp.maximum(token_ids[:, 0], 0)
        return jax.lax.all_gather(_packed(logits, token_ids), "dp")

    return Program(
        "logprobs",
        body,
        programs.mesh,
        (
            programs.shape(groups * slots, vocab, dtype=jnp.float32),
            programs.shape(*shape),
        ),
        (ROWS, REPLICATED),
        REPLICATED,
        donated=(),
    )


def score(programs: TokenPrograms, bucket: Bucket) -> Program:
    """(targets, stream…, head…) → log-probabilities of the targets, `[groups, tokens, …]`.

    The head runs over as many rows at a time as it does for sampling.
    """
    head, streams = programs.templates.head, programs.stream_shapes(bucket)
    slots, tokens = programs.slots, bucket.tokens

    def body(targets: Array, *rest: Array) -> Array:
        x = programs.stream(rest[: len(streams)])
        block = head.merge(rest[len(streams) :])
        missing = -tokens % slots
        rows = jnp.pad(x, ((0, missing), (0, 0))).reshape(-1, slots, x.shape[1])
        wanted = jnp.pad(targets[0], (0, missing)).reshape(-1, slots)
        packed = jax.lax.map(lambda part: _packed(block(part[0]), part[1]), (rows, wanted))
        return jax.lax.all_gather(packed.reshape(-1, packed.shape[2])[:tokens], "dp")

    return Program(
        "score",
        body,
        programs.mesh,
        (programs.shape(programs.groups, tokens), *streams, *head.leaves),
        (ROWS, *programs.stream_specs(), *head.specs(ATTENTION_RULES)),
        REPLICATED,
        donated=(),
    )


def counts_shape(programs: TokenPrograms) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a lane's token counts, `[groups * slots, vocab]`."""
    return programs.shape(programs.groups * programs.slots, programs.config.vocab)


def _packed(
    logits: Float[Array, "rows vocab"], token_ids: Int[Array, " rows"]
) -> Int[Array, "rows width"]:
    """Per row: the token's log-probability, the likeliest tokens, theirs; floats as bits."""
    top = min(MAX_LOGPROBS, logits.shape[1])
    logs, ids, best = log_probabilities(logits, token_ids, top)

    def bits(values: Array) -> Array:
        return jax.lax.bitcast_convert_type(values, jnp.int32)

    return jnp.concatenate([bits(logs)[:, None], ids.astype(jnp.int32), bits(best)], axis=1)


def _rules(fields: dict[str, Array]) -> Rules:
    for name in FLOATS:
        fields[name] = jax.lax.bitcast_convert_type(fields[name], jnp.float32)
    return Rules(
        **{name: field[:, 0] if field.shape[1] == 1 else field for name, field in fields.items()}
    )
