"""Programs of the attention role, compiled for each bucket, and the weights that they take.

Where a host drives the layers, a step runs `enter` (embedding, first layer's attention), `attend`
for each further layer, and `leave` (last answer, head, sampling); every layer of a kind shares one
`attend`. A message leaves as one array with a piece on each attention device, and its answer comes
back likewise (`link/dispatch/contract.py`).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.message import answer_format, message_formats
from jaxserve.mesh import ATTENTION_RULES, AnyMesh, cached_sharding
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.blocks import AttentionTemplates
from jaxserve.model.residual import added
from jaxserve.roles.compilation import (
    PIECES,
    REPLICATED,
    ROWS,
    Arrays,
    Call,
    Get,
    Program,
    compile_steps,
    hot_call,
)
from jaxserve.roles.drafting import (
    DraftingExecutables,
    StepEnd,
    drafting_executables,
    enter_module,
    first_pass,
    leave_module,
    next_pass,
)
from jaxserve.roles.layout import Bucket, deployment_buckets
from jaxserve.roles.sampling import SamplingExecutables, sampling_executables
from jaxserve.roles.step_arrays import BatchLayout
from jaxserve.roles.token_programs import TokenPrograms
from jaxserve.roles.weights import LeafSource, Leaves, RoleWeights, load_progress
from jaxserve.roles.worker import modules_of


class AttentionPrograms(TokenPrograms):
    """Programs of the attention mesh in a deployment with a separate ffn role: those that end a
    step or a prediction module's pass; and a layer's part, which other programs contain."""

    def __init__(self, templates: AttentionTemplates, deployment: Deployment, mesh: AnyMesh):
        super().__init__(templates, deployment, mesh)
        self.contract = Contract.of(templates.config, deployment)
        self.formats, self.answers = message_formats(self.contract), answer_format(self.contract)

    def leave(self, bucket: Bucket) -> Program:
        """(x, last_tokens, batch, combined, head) → (last_tokens, sampled, logits), and with drafts
        also the lengths (`TokenPrograms.draw`)."""

        def body(x: Array, last: Array, batch: Array, combined: Arrays, head: Arrays) -> Arrays:
            fields = BatchLayout(bucket.tokens, self.slots).fields(batch[0])
            return self.end_step(self.stream((x, *combined)), last, fields, head, bucket)

        (x, *answers), (last, batch, _) = self.stream_shapes(bucket), self.step_shapes(bucket)
        lengths = [ROWS] if bucket.drafts else []
        return Program(
            "leave",
            body,
            self.mesh,
            (x, last, batch, tuple(answers), *self.leaves(self.templates.head)),
            (ROWS, REPLICATED, self.logits_spec, *lengths),
            cuda_graphs="branches",
        )

    def first_pass(self, bucket: Bucket) -> Program:
        """(batch, sampled, lengths, stream, head, embedding, module) → (x, batch): the input of the
        module's layer, and the batch array, of the first pass."""
        templates = self.templates

        def body(
            batch: Array, sampled: Array, lengths: Array, stream: Arrays, weights: Sequence[Arrays]
        ) -> Arrays:
            (head, *entered), x = weights, self.stream(stream)
            own = sampled[jax.lax.axis_index("dp")]
            start = first_pass(self, bucket.tokens, x, batch[0], own, lengths[0], head)
            return enter_module(self, bucket.tokens, start, *entered), start.batch[None]

        return Program(
            "first_pass",
            body,
            self.mesh,
            (
                self.step_shapes(bucket)[1],
                self.shape(self.groups, self.slots, 1 + bucket.drafts, spec=REPLICATED),
                self.shape(self.groups, self.slots),
                self.stream_shapes(bucket),
                self.leaves(templates.head, templates.embedding, templates.prediction),
            ),
            (ROWS, ROWS),
        )

    def next_pass(self, bucket: Bucket, then: Literal["again", "further", "last"]) -> Program:
        """Ends a pass and begins the next, of the same module or of a further one: (numbers, batch,
        drafts, stream, module, head, embedding, next module) → (x, batch, drafts), see
        `first_pass`. The last one takes neither embedding nor next module, and returns its drafts.

        `numbers` is int32 [3]: the number of the pass, from 0; the distance of its draft's position
        from the batch's KV lengths; and the number of positions that the page table has room for.
        """
        tokens, blocks = bucket.tokens, [self.templates.prediction, self.templates.head]
        if then != "last":
            blocks += [self.templates.embedding, self.templates.prediction]

        def body(
            numbers: Array, batch: Array, drafts: Array, stream: Arrays, weights: Sequence[Arrays]
        ) -> Arrays:
            (number, ahead, longest), (module, head, *entered) = numbers, weights
            x = self.stream(stream)
            hidden, draft = leave_module(self, tokens, x, batch[0], ahead, module, head)
            samples = BatchLayout(tokens, self.slots).fields(batch[0])["sample"] > 0
            kept = jnp.where(samples, draft, drafts[0, :, number])
            drafts = drafts.at[0, :, number].set(kept)
            if then == "last":
                return (drafts,)
            again = then == "again"
            start = next_pass(self, tokens, hidden, batch[0], draft, again=again, longest=longest)
            return enter_module(self, tokens, start, *entered), start.batch[None], drafts

        return Program(
            "next_pass",
            body,
            self.mesh,
            (
                self.shape(3, spec=REPLICATED),
                self.step_shapes(bucket)[1],
                self.shape(self.groups, self.slots, bucket.drafts),
                self.stream_shapes(bucket),
                self.leaves(*blocks),
            ),
            (ROWS,) * (1 if then == "last" else 3),
        )

    def _attend(
        self, kind: LayerKind, x: Array, pages: Pages, batch: RaggedBatch, leaves: Sequence[Any]
    ) -> tuple[Array, ...]:
        """Runs one layer on the attention mesh; returns this device's piece of the message."""
        block = self.templates.attention[kind].merge(leaves)
        x, message, pages = block(x, pages, self.of_kind(batch, kind), self.sentinel)
        with jax.named_scope("pack"):
            packed = self.formats[kind.ffn.kind].pack(_share(message, "tp"))
        return x, packed, *pages

    def _add_combined(self, x: Array, *combined: Array) -> Float[Array, "tokens residual"]:
        """Adds the ffn role's answer to the residual stream. Each device has the answer to its own
        piece; the answers of several ffn instances are summed."""
        with jax.named_scope("combine"):
            shares = [jax.lax.all_gather(part, "tp", axis=0, tiled=True) for part in combined]
            return added(self.config, x, self.answers.total(shares, x.dtype))


class LayerPrograms(AttentionPrograms):
    """Programs of single layers, for hosts that drive a step layer by layer.

    Attributes:
      layer_pages: shapes of the pages of each layer.
    """

    stacked = False

    def __init__(self, templates: AttentionTemplates, deployment: Deployment, mesh: AnyMesh):
        super().__init__(templates, deployment, mesh)
        kinds = map(self.config.layer, range(self.config.all_layers))
        self.layer_pages = [self.pool(kind).arrays for kind in kinds]
        self._shared = functools.cache(self._shared_part)

    @property
    def all_pages(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The pages of all layers, layer after layer."""
        return sum(self.layer_pages, ())

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

    def attend(self, bucket: Bucket, kind: LayerKind, *, begins: bool = False) -> Program:
        """(x, page_table, shared, pages, combined, layer) → (x, message, pages…); for `begins` see
        `predict`."""

        def body(x: Array, table: Array, shared: Any, pages: Pages, *rest: Arrays) -> Arrays:
            combined, layer = rest
            if begins:
                batch = self.step_context(bucket, shared, table).batch
            else:
                batch = shared._replace(page_table=table[0])
                x = self._add_combined(x, *combined)
            return self._attend(kind, x, pages, batch, layer)

        (x, *answers), shared = self.stream_shapes(bucket), self._shared(bucket)
        _, batch, table = self.step_shapes(bucket)
        given = (batch, ()) if begins else (shared, tuple(answers))
        layer = self.leaves(self.templates.attention[kind])
        return Program(
            "predict" if begins else f"attend_{kind}",
            body,
            self.mesh,
            (x, table, given[0], self.pool(kind).arrays, given[1], *layer),
            (ROWS, PIECES, *self.pages_specs(self.pool(kind))),
            donates=(0, 3),
            cuda_graphs="off",
        )

    def predict(self, bucket: Bucket) -> Program:
        """`attend` of a prediction module's layer, with x as its pass begins, and the batch array:
        (x, page_table, batch, pages, layer) → (x, message, pages…)."""
        return self.attend(bucket, self.config.layer(self.config.layers), begins=True)

    def stream_shapes(self, bucket: Bucket) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the residual stream after a layer: x, and the ffn role's answer to the layer's
        message, one array for each instance of the ffn mesh."""
        (x,), rows = super().stream_shapes(bucket), self.groups * bucket.tokens
        answer = self.shape(rows, self.answers.width, dtype=self.answers.dtype, spec=PIECES)
        return x, *[answer] * self.contract.instances

    def stream(self, parts: Sequence[Array]) -> Float[Array, "tokens residual"]:
        """The residual stream: x plus the last layer's FFN output."""
        return self._add_combined(*parts)

    def _shared_part(self, bucket: Bucket) -> Any:
        """The part of a batch that layers share: a `RaggedBatch` of shapes, without page table."""

        def shared(batch: Array, table: Array) -> Any:
            return _without_table(self.step_context(bucket, batch, table).batch)

        mapped = jax.shard_map(
            shared, mesh=self.mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False
        )
        made = jax.eval_shape(mapped, *self.step_shapes(bucket)[1:])
        return jax.tree.map(lambda array: self.shape(*array.shape, dtype=array.dtype), made)


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
        self.predictions = add_modules(self, templates, names)


def add_modules(
    weights: RoleWeights, templates: AttentionTemplates, names: CheckpointNames
) -> list[Leaves]:
    """Loads what prediction modules have beside their layers."""
    block, sources = templates.prediction, enumerate(names.predictions, templates.config.layers)
    return [weights.add("prediction", block, own, ATTENTION_RULES, n) for n, own in sources]


def pass_executables(programs: AttentionPrograms, bucket: Bucket, get: Get) -> dict[str, Any]:
    """Collects the programs at both ends of the prediction modules' passes, which follow steps with
    drafts: each form of `next_pass`, and `first_pass` as "first". Without any pass, none."""
    modules, tokens = modules_of(programs.config, bucket), bucket.of_tokens
    then = dict.fromkeys(following(modules, number) for number in range(len(modules)))
    found = {name: get(AttentionPrograms.next_pass, tokens, name) for name in then}
    return found and found | {"first": get(AttentionPrograms.first_pass, tokens)}


def following(modules: Sequence[int], number: int) -> str:
    """Returns what follows the pass of this number, as `AttentionPrograms.next_pass` takes it."""
    if number + 1 == len(modules):
        return "last"
    return "again" if modules[number + 1] == modules[number] else "further"


class Passes:
    """Calls the programs at both ends of the passes that follow a bucket's steps.

    Attributes:
      modules: the module of each pass, from 1.
    """

    def __init__(
        self,
        programs: AttentionPrograms,
        bucket: Bucket,
        bound: Mapping[str, jax.stages.Compiled],
        weights: tuple[Leaves, Leaves, Sequence[Leaves]],
    ):
        embedding, head, modules = weights
        self.modules = own = modules_of(programs.config, bucket)
        entered = [(*embedding, *modules[module - 1]) for module in own]
        self._first, self._entered = hot_call(bound["first"]), (*head, *entered[0])
        longest = bucket.pages * programs.deployment.cache.page_size
        sharding = cached_sharding(programs.mesh, REPLICATED)
        self._then: list[tuple[Call, jax.Array, Leaves]] = []
        for number, module in enumerate(own):
            numbers = np.asarray([number, module, longest], np.int32)
            put = jax.make_array_from_callback(numbers.shape, sharding, numbers.__getitem__)
            leaves = (*modules[module - 1], *head, *sum(entered[number + 1 : number + 2], ()))
            self._then.append((hot_call(bound[following(own, number)]), put, leaves))

    def first(self, end: StepEnd) -> tuple[jax.Array, ...]:
        """Returns x, batch array and drafts of the first pass."""
        given = end.batch, end.sampled, end.lengths, *end.stream
        return *self._first(*given, *self._entered), end.drafts

    def next(
        self, number: int, begun: Sequence[jax.Array], stream: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        """Ends the pass of this number. Returns what `first` does, of the pass after it; after the
        last one only the drafts.

        Args:
          begun: result of the call that began the pass.
        """
        call, numbers, leaves = self._then[number]
        return tuple(call(numbers, *begun[1:], *stream, *leaves))


class AttentionExecutables(NamedTuple):
    """Programs of a step of one bucket."""

    enter: jax.stages.Compiled
    attend: dict[LayerKind, jax.stages.Compiled]
    leave: jax.stages.Compiled
    sampling: SamplingExecutables | None
    drafting: DraftingExecutables | None
    passes: dict[str, jax.stages.Compiled]
    """See `pass_executables`; and `LayerPrograms.predict`."""


def attention_executables(
    programs: LayerPrograms, buckets: Sequence[Bucket], get: Get
) -> dict[Bucket, AttentionExecutables]:
    """Collects the programs for the steps of each bucket. Buckets with equal tokens share the
    programs that read no pages."""
    first, *others = programs.config.decoder
    later = dict.fromkeys(others)

    def step(bucket: Bucket) -> AttentionExecutables:
        plain, made = bucket.undrafted, LayerPrograms
        return AttentionExecutables(
            get(made.enter, plain, first),
            {kind: get(made.attend, plain, kind) for kind in later},
            get(made.leave, bucket.of_tokens),
            sampling_executables(programs, bucket, get),
            drafting_executables(programs, bucket, get),
            (passes := pass_executables(programs, bucket, get))
            and passes | {"predict": get(made.predict, plain)},
        )

    return {bucket: step(bucket) for bucket in buckets}


def build_attention(
    templates: AttentionTemplates,
    deployment: Deployment,
    mesh: Mesh,
    source: LeafSource,
    names: CheckpointNames,
    executables: dict[Bucket, AttentionExecutables] | None = None,
) -> tuple[LayerPrograms, dict[Bucket, AttentionExecutables], AttentionWeights]:
    """Loads weights and compiles programs: all arguments of `AttentionWorker` but its link.

    Args:
      executables: programs for this model, deployment and mesh; None: compiles them.
    """
    programs = LayerPrograms(templates, deployment, mesh)
    buckets = deployment_buckets(deployment)
    with load_progress(source, 2 + templates.config.all_layers):
        weights = AttentionWeights(source, names, programs)
    executables = executables or compile_steps(attention_executables, programs, buckets)
    return programs, executables, weights
