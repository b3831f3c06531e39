"""Programs of the attention role, compiled for each bucket, and the weights that they take.

A step runs `enter` (embedding, first layer's attention), `attend` for each further layer, and
`leave` (last answer, head, sampling); every layer of a kind shares one `attend`. A message leaves
as one array with a piece on each attention device, and its answer comes back likewise
(`link/dispatch/contract.py`).
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.message import answer_format, message_formats
from jaxserve.mesh import ATTENTION_RULES, AnyMesh
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.blocks import AttentionTemplates
from jaxserve.model.residual import added
from jaxserve.roles.batch_layout import BatchLayout
from jaxserve.roles.compilation import Get, compile_steps
from jaxserve.roles.drafting import DraftingExecutables, drafting_executables
from jaxserve.roles.layout import Bucket, deployment_buckets
from jaxserve.roles.prediction_programs import (
    PassStart,
    enter_module,
    first_pass,
    leave_module,
    next_pass,
)
from jaxserve.roles.program import PIECES, REPLICATED, ROWS, Arrays, Program
from jaxserve.roles.sampling import SamplingExecutables, sampling_executables
from jaxserve.roles.token_programs import TokenPrograms
from jaxserve.roles.weights import LeafSource, RoleWeights, load_progress


class AttentionPrograms(TokenPrograms):
    """Programs of the attention mesh in a deployment with a separate ffn role."""

    def __init__(self, templates: AttentionTemplates, deployment: Deployment, mesh: AnyMesh):
        super().__init__(templates, deployment, mesh)
        self.contract = Contract.of(templates.config, deployment)
        self.formats, self.answers = message_formats(self.contract), answer_format(self.contract)
        self._shapes: dict[Bucket, Any] = {}

    def enter(self, bucket: Bucket, kind: LayerKind) -> Program:
        """(last_tokens, page_table, batch, pages, embedding, layer) → (x, message, pages…,
        shared…). `attend` takes `shared` in place of the batch."""
        blocks = self.templates.embedding, self.templates.attention[kind]

        def body(
            last: Array, table: Array, batch: Array, pages: Pages, weights: Sequence[Arrays]
        ) -> Arrays:
            context = self.step_context(bucket, batch, table, last)
            embedding, layer = weights
            x = self.embed(context, embedding)
            made = self._attend(kind, x, pages, context.batch, layer)
            return *made, *jax.tree.leaves(_without_table(context.batch))

        shared = jax.tree.leaves(self._shared(bucket))
        last, batch, table = self.step_shapes(bucket)
        return Program(
            f"enter_{kind}",
            body,
            self.mesh,
            (last, table, batch, self.pool(kind).arrays, self.leaves(*blocks)),
            (ROWS, PIECES, *self.pages_specs(self.pool(kind)), *[ROWS] * len(shared)),
            donates=(3,),
            cuda_graphs="off",
        )

    def attend(self, bucket: Bucket, kind: LayerKind) -> Program:
        """(x, page_table, shared, pages, combined, layer) → (x, message, pages…)."""

        def body(
            x: Array, table: Array, shared: RaggedBatch, pages: Pages, *rest: Arrays
        ) -> Arrays:
            combined, layer = rest
            batch = shared._replace(page_table=table[0])
            return self._attend(kind, self._add_combined(x, *combined), pages, batch, layer)

        x, *answers = self.stream_shapes(bucket)
        *_, table = self.step_shapes(bucket)
        layer = self.leaves(self.templates.attention[kind])
        return Program(
            f"attend_{kind}",
            body,
            self.mesh,
            (x, table, self._shared(bucket), self.pool(kind).arrays, tuple(answers), *layer),
            (ROWS, PIECES, *self.pages_specs(self.pool(kind))),
            donates=(0, 3),
            cuda_graphs="off",
        )

    def first_pass(self, bucket: Bucket) -> Program:
        """(batch, sampled, lengths, stream, head) → (hidden, batch of the first pass)."""

        def body(
            batch: Array, sampled: Array, lengths: Array, stream: Arrays, head: Arrays
        ) -> Arrays:
            own, x = sampled[jax.lax.axis_index("dp")], self.stream(stream)
            start = first_pass(self, bucket.tokens, x, batch[0], own, lengths[0], head)
            return start.hidden, start.batch[None]

        return Program(
            "first_pass",
            body,
            self.mesh,
            (
                self.step_shapes(bucket)[1],
                self.shape(self.groups, self.slots, 1 + bucket.drafts, spec=REPLICATED),
                self.shape(self.groups, self.slots),
                self.stream_shapes(bucket),
                *self.leaves(self.templates.head),
            ),
            (ROWS, ROWS),
        )

    def predict(self, bucket: Bucket) -> Program:
        """A module's part of a pass before its FFN: (hidden, batch, page_table, pages, embedding,
        module, layer) → (x, message, pages…)."""
        kind, templates = self.config.layer(self.config.layers), self.templates
        blocks = templates.embedding, templates.prediction, templates.attention[kind]

        def body(
            hidden: Array, batch: Array, table: Array, pages: Pages, weights: Sequence[Arrays]
        ) -> Arrays:
            embedding, module, layer = weights
            x = enter_module(self, bucket.tokens, PassStart(hidden, batch[0]), embedding, module)
            context = self.step_context(bucket, batch, table)
            return self._attend(kind, x, pages, context.batch, layer)

        (x, *_), (_, batch, table) = self.stream_shapes(bucket), self.step_shapes(bucket)
        return Program(
            "predict",
            body,
            self.mesh,
            (x, batch, table, self.pool(kind).arrays, self.leaves(*blocks)),
            (ROWS, PIECES, *self.pages_specs(self.pool(kind))),
            donates=(0, 3),
            cuda_graphs="off",
        )

    def next_pass(self, bucket: Bucket, module: Literal["again", "further"]) -> Program:
        """Ends a pass and begins the next, of the same module or of a further one: (numbers, batch,
        drafts, stream, module, head) → (hidden, batch, drafts).

        `numbers` is int32 [3]: the number of the pass, from 0; the distance of its draft's position
        from the batch's KV lengths; and the number of positions that the page table has room for.
        """
        tokens, again = bucket.tokens, module == "again"

        def body(
            numbers: Array, batch: Array, drafts: Array, stream: Arrays, weights: Sequence[Arrays]
        ) -> Arrays:
            (number, ahead, longest), (leaves, head) = numbers, weights
            x = self.stream(stream)
            hidden, draft = leave_module(self, tokens, x, batch[0], ahead, leaves, head)
            samples = BatchLayout(tokens, self.slots).fields(batch[0])["sample"] > 0
            kept = jnp.where(samples, draft, drafts[0, :, number])
            drafts = drafts.at[0, :, number].set(kept)
            start = next_pass(self, tokens, hidden, batch[0], draft, again=again, longest=longest)
            return start.hidden, start.batch[None], drafts

        return Program(
            "next_pass",
            body,
            self.mesh,
            (
                self.shape(3, spec=REPLICATED),
                self.step_shapes(bucket)[1],
                self.shape(self.groups, self.slots, bucket.drafts),
                self.stream_shapes(bucket),
                self.leaves(self.templates.prediction, self.templates.head),
            ),
            (ROWS, ROWS, ROWS),
        )

    def leave(self, bucket: Bucket) -> Program:
        """(x, last_tokens, batch, combined, head) → (last_tokens, sampled, logits), and with drafts
        also the lengths (`TokenPrograms.draw`)."""

        def body(x: Array, last: Array, batch: Array, combined: Arrays, head: Arrays) -> Arrays:
            fields = BatchLayout(bucket.tokens, self.slots).fields(batch[0])
            return self.end_step(self._add_combined(x, *combined), last, fields, head, bucket)

        (x, *answers), (last, batch, _) = self.stream_shapes(bucket), self.step_shapes(bucket)
        return Program(
            "leave",
            body,
            self.mesh,
            (x, last, batch, tuple(answers), *self.leaves(self.templates.head)),
            (ROWS, REPLICATED, self.logits_spec, *([ROWS] if bucket.drafts else [])),
            cuda_graphs="branches",
        )

    def stream_shapes(self, bucket: Bucket) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the residual stream after a layer: x, and the ffn role's answer to the layer's
        message, one array for each instance of the ffn mesh."""
        (x,), rows = super().stream_shapes(bucket), self.groups * bucket.tokens
        answer = self.shape(rows, self.answers.width, dtype=self.answers.dtype, spec=PIECES)
        return x, *[answer] * self.contract.instances

    def stream(self, parts: Sequence[Array]) -> Float[Array, "tokens residual"]:
        """The residual stream: x plus the last layer's FFN output."""
        return self._add_combined(*parts)

    def _attend(
        self, kind: LayerKind, x: Array, pages: Pages, batch: RaggedBatch, leaves: Sequence[Array]
    ) -> tuple[Array, ...]:
        """Runs one layer on the attention mesh; returns this device's piece of the message."""
        block = self.templates.attention[kind].merge(leaves)
        x, message, pages = block(x, pages, self.of_kind(batch, kind), self.sentinel)
        with jax.named_scope("pack"):
            packed = self.formats[kind.ffn.kind].pack(_share(message, "tp"))
        return x, packed, *pages

    def _shared(self, bucket: Bucket) -> Any:
        """The part of a batch that layers share: a `RaggedBatch` of shapes, without page table."""
        if bucket not in self._shapes:

            def shared(batch: Array, table: Array) -> Any:
                return _without_table(self.step_context(bucket, batch, table).batch)

            mapped = jax.shard_map(
                shared, mesh=self.mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False
            )
            made = jax.eval_shape(mapped, *self.step_shapes(bucket)[1:])
            self._shapes[bucket] = jax.tree.map(
                lambda array: self.shape(*array.shape, dtype=array.dtype), made
            )
        return self._shapes[bucket]

    def _add_combined(self, x: Array, *combined: Array) -> Float[Array, "tokens residual"]:
        """Adds the ffn role's answer to the residual stream. Each device has the answer to its own
        piece; the answers of several ffn instances are summed."""
        with jax.named_scope("combine"):
            shares = [jax.lax.all_gather(part, "tp", axis=0, tiled=True) for part in combined]
            return added(self.config, x, self.answers.total(shares, x.dtype))


def _without_table(batch: RaggedBatch) -> Any:
    """Removes the page table, which each program takes as an argument; None is no leaf."""
    return batch._replace(page_table=None)  # type: ignore[arg-type]


def _share(message: Any, axis: str) -> Any:
    """This device's equal share of a message that all devices of `axis` hold."""
    ranks, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    if ranks == 1:
        return message

    def cut(rows: Array) -> Array:
        size = rows.shape[0] // ranks
        return jax.lax.dynamic_slice_in_dim(rows, me * size, size)

    return jax.tree.map(cut, message)


class AttentionWeights(RoleWeights):
    """Weights of an attention worker: embedding, head, a block for each layer (layers of prediction
    modules included), and the prediction modules' other leaves."""

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: AttentionPrograms):
        super().__init__(source, programs.mesh)
        templates, config = programs.templates, programs.config
        self.embedding, self.head = self.add_ends(templates, names, ATTENTION_RULES)
        for layer in range(config.all_layers):
            block, sources = templates.attention[config.layer(layer)], names.attention[layer]
            self.add("attention", block, sources, ATTENTION_RULES, layer)
        self.layers = self.blocks[:]
        self.predictions = [
            self.add("prediction", templates.prediction, sources, ATTENTION_RULES, layer)
            for layer, sources in enumerate(names.predictions, config.layers)
        ]


class PassExecutables(NamedTuple):
    """Programs of the prediction modules' passes, which follow a step with drafts."""

    first: jax.stages.Compiled
    predict: jax.stages.Compiled
    further: jax.stages.Compiled
    """Runs between passes of different modules."""
    again: jax.stages.Compiled
    """Runs between two passes of the same module."""


class AttentionExecutables(NamedTuple):
    """Programs of a step of one bucket."""

    enter: jax.stages.Compiled
    attend: dict[LayerKind, jax.stages.Compiled]
    leave: jax.stages.Compiled
    sampling: SamplingExecutables | None
    drafting: DraftingExecutables | None = None
    passes: PassExecutables | None = None
    """None without prediction modules, or for steps without drafts."""


def attention_executables(
    programs: AttentionPrograms, buckets: Sequence[Bucket], get: Get
) -> dict[Bucket, AttentionExecutables]:
    """Collects the programs for the steps of each bucket. Buckets with equal tokens share the
    programs that read no pages."""
    first, *others = programs.config.decoder
    later = dict.fromkeys(others)

    def step(bucket: Bucket) -> AttentionExecutables:
        plain, made = bucket.undrafted, AttentionPrograms
        return AttentionExecutables(
            get(made.enter, plain, first),
            {kind: get(made.attend, plain, kind) for kind in later},
            get(made.leave, bucket.of_tokens),
            sampling_executables(programs, bucket, get),
            drafting_executables(programs, bucket, get),
            _passes(programs, bucket, get) if programs.config.modules and bucket.drafts else None,
        )

    return {bucket: step(bucket) for bucket in buckets}


def _passes(programs: AttentionPrograms, bucket: Bucket, get: Get) -> PassExecutables:
    tokens, made = bucket.of_tokens, AttentionPrograms
    again = get(made.next_pass, tokens, "again")
    return PassExecutables(
        get(made.first_pass, tokens),
        get(made.predict, bucket.undrafted),
        get(made.next_pass, tokens, "further") if programs.config.modules > 1 else again,
        again,
    )


def build_attention(
    templates: AttentionTemplates,
    deployment: Deployment,
    mesh: Mesh,
    source: LeafSource,
    names: CheckpointNames,
    executables: dict[Bucket, AttentionExecutables] | None = None,
) -> tuple[AttentionPrograms, dict[Bucket, AttentionExecutables], AttentionWeights]:
    """Loads weights and compiles programs: all arguments of `AttentionWorker` but its link.

    Args:
      executables: programs for this model, deployment and mesh; None: compiles them.
    """
    programs = AttentionPrograms(templates, deployment, mesh)
    buckets = deployment_buckets(deployment)
    with load_progress(source, 2 + templates.config.all_layers):
        weights = AttentionWeights(source, names, programs)
    executables = executables or compile_steps(attention_executables, programs, buckets)
    return programs, executables, weights
