"""The programs of a step, as functions over one device's slices, with the shapes they take.

AFD (design, decision 1): `enter` (embed, first attend), `attend`, `leave` (last combine, head,
sample) on the attention mesh, `ffn` on the ffn mesh; every layer of a kind shares one of each.
Colocated (decision 2): the whole step in one program that scans over stacked layers. Both are the
same blocks (`model.py`) and differ only in what happens at the link. `pipeline/executables.py`
compiles them, `pipeline/driver.py` runs them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.attention.batch import RaggedBatch, ragged_batch
from jaxserve.attention.kv_cache import PAGES_SPEC, Pages, page_arrays
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFNKind, LayerKind
from jaxserve.ffn.placement import physical_experts
from jaxserve.link.message import MessageFormat, row_multiple
from jaxserve.link.route import Route, combine_route, dispatch_route
from jaxserve.mesh import ATTENTION_RULES, Submeshes, cached_sharding
from jaxserve.model import ModelTemplates
from jaxserve.quant import as_bits
from jaxserve.sampler import SamplerState, sample
from jaxserve.step import FROM_DEVICE, BatchLayout, Bucket

ROWS = PartitionSpec("dp")
PIECES = PartitionSpec(("dp", "tp"))
REPLICATED = PartitionSpec()


class Program(NamedTuple):
    """A function over device slices, ready to be compiled for its mesh."""

    name: str
    body: Callable[..., Any]
    mesh: Mesh
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    donated: tuple[int, ...]

    def compile(self) -> jax.stages.Compiled:
        """Compiles ahead of time for the shapes and shardings above."""
        mapped = jax.shard_map(
            self.body,
            mesh=self.mesh,
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            check_vma=False,
        )
        mapped.__name__ = self.name
        arguments = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=cached_sharding(self.mesh, spec))
            for a, spec in zip(self.arguments, self.in_specs, strict=True)
        ]
        return jax.jit(mapped, donate_argnums=self.donated).lower(*arguments).compile()


class StepContext(NamedTuple):
    """What a step's attention-side layers share; built from its arrays inside each program."""

    batch: RaggedBatch
    fields: dict[str, Array]


class _Programs:
    """What AFD and colocated programs share: shapes, the step's entrance and its exit."""

    def __init__(self, templates: ModelTemplates, deployment: Deployment, meshes: Submeshes):
        self.templates = templates
        self.config = templates.config
        self.dtype = templates.dtype
        self.deployment = deployment
        self.meshes = meshes
        self.slots = deployment.scheduler.slots
        self.groups = deployment.attention.dp
        self.sentinel = physical_experts(self.config.experts, templates.ranks[0])
        self.page_arrays = page_arrays(self.config, deployment)
        self.formats: dict[FFNKind, MessageFormat] = {
            kind: MessageFormat(
                self.config.d_model,
                self.config.top_k if kind == "moe" else 0,
                deployment.dispatch_format,
            )
            for kind in templates.ffn
        }

    def step_context(self, bucket: Bucket, batch: Array, page_table: Array) -> StepContext:
        """The device's DP group's view of the step's arrays `[1, width]`, `[1, slots, pages]`."""
        fields = BatchLayout(bucket.tokens, self.slots).fields(batch[0])
        ragged = ragged_batch(
            fields["query_start"], fields["kv_length"], page_table[0], bucket.tokens
        )
        return StepContext(ragged, fields)

    def embed(
        self, context: StepContext, last_tokens: Int[Array, "1 slots"], leaves: Sequence[Array]
    ) -> Float[Array, "tokens d_model"]:
        """Embeds the step's tokens, taking those still on the device from `last_tokens`."""
        ids = context.fields["token_ids"]
        ids = jnp.where(ids == FROM_DEVICE, last_tokens[0][context.batch.sequence_of_token], ids)
        with jax.named_scope("embed"):
            return self.templates.embedding.merge(leaves)(ids)

    def sample_step(
        self,
        x: Float[Array, "tokens d_model"],
        last_tokens: Int[Array, "1 slots"],
        fields: dict[str, Array],
        leaves: Sequence[Array],
    ) -> tuple[Int[Array, "1 slots"], Int[Array, "groups slots"], Float[Array, "slots vocab"]]:
        """Head and sampler on every slot's last token.

        Returns the lane's last tokens, all DP groups' sampled tokens (so that any process of the
        role can read them), and the logits.
        """
        row = jnp.maximum(fields["query_start"][1:] - 1, 0)
        with jax.named_scope("head"):
            logits = self.templates.head.merge(leaves)(x[row])
        with jax.named_scope("sample"):
            bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)
            state = SamplerState(
                temperature=bits(fields["temperature"]),
                top_k=fields["top_k"],
                top_p=bits(fields["top_p"]),
                min_p=bits(fields["min_p"]),
                seed=fields["seed"].astype(jnp.uint32),
                position=fields["kv_length"],
            )
            drawn = sample(logits, state)
        last = jnp.where(fields["sample"] > 0, drawn, last_tokens[0])[None]
        return last, jax.lax.all_gather(last[0], "dp"), logits

    def _shape(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def _step_shapes(self, bucket: Bucket) -> tuple[jax.ShapeDtypeStruct, ...]:
        """last_tokens, batch, page_table."""
        width = BatchLayout(bucket.tokens, self.slots).width
        return (
            self._shape(self.groups, self.slots),
            self._shape(self.groups, width),
            self._shape(self.groups, self.slots, bucket.pages),
        )


def step_multiple(deployment: Deployment) -> int:
    """Tokens a DP group must be a multiple of this, so that all pieces of a message are equal."""
    if deployment.mode == "colocated":
        return 1
    multiple, groups = deployment.attention.devices, deployment.attention.dp
    if deployment.link.route == "trampoline":
        multiple = row_multiple(multiple, deployment.ffn.devices)
    return multiple // math.gcd(multiple, groups)


class AFDPrograms(_Programs):
    """The programs of attention-FFN disaggregation and the routes between them."""

    def __init__(self, templates: ModelTemplates, deployment: Deployment, meshes: Submeshes):
        super().__init__(templates, deployment, meshes)
        attention, ffn = meshes.attention.size, meshes.ffn.size
        self.broadcast = deployment.link.route == "broadcast"
        self.dispatch: Route = dispatch_route(attention, ffn, deployment.link.route)
        self.combine: Route = combine_route(attention, ffn, deployment.link.route)

    @property
    def row_multiple(self) -> int:
        """`step_multiple` of the deployment."""
        return step_multiple(self.deployment)

    def piece_rows(self, bucket: Bucket) -> int:
        """Rows of one piece, in both directions."""
        rows = self.groups * bucket.tokens
        attention = self.meshes.attention.size
        return rows // (
            attention if self.broadcast else row_multiple(attention, self.meshes.ffn.size)
        )

    def enter(self, bucket: Bucket, kind: LayerKind) -> Program:
        """(last_tokens, batch, page_table, pages…, embedding…, layer…) → (x, pieces…, pages…)."""
        embedding, layer = self.templates.embedding, self.templates.attention[kind]
        cuts = (len(self.page_arrays), len(embedding.leaves), len(layer.leaves))

        def body(last: Array, batch: Array, table: Array, *rest: Array) -> tuple[Array, ...]:
            pages, table_leaves, leaves = _cut(rest, cuts)
            context = self.step_context(bucket, batch, table)
            x = self.embed(context, last, table_leaves)
            return self._attend(kind, x, pages, context.batch, leaves)

        pages = [PAGES_SPEC] * len(self.page_arrays)
        return Program(
            f"enter_{kind}",
            body,
            self.meshes.attention,
            (
                *self._step_shapes(bucket),
                *self.page_arrays,
                *embedding.leaves,
                *layer.leaves,
            ),
            (
                *(ROWS, ROWS, ROWS),
                *pages,
                *embedding.specs(ATTENTION_RULES),
                *layer.specs(ATTENTION_RULES),
            ),
            (ROWS, *[PIECES] * self.dispatch.sends, *pages),
            donated=tuple(range(3, 3 + len(pages))),
        )

    def attend(self, bucket: Bucket, kind: LayerKind) -> Program:
        """(x, batch, page_table, pages…, combined…, layer…) → (x, pieces…, pages…)."""
        layer, received = self.templates.attention[kind], self.combine.receives
        cuts = (len(self.page_arrays), received, len(layer.leaves))

        def body(x: Array, batch: Array, table: Array, *rest: Array) -> tuple[Array, ...]:
            pages, combined, leaves = _cut(rest, cuts)
            context = self.step_context(bucket, batch, table)
            return self._attend(kind, self._add_combined(x, combined), pages, context.batch, leaves)

        pages = [PAGES_SPEC] * len(self.page_arrays)
        return Program(
            f"attend_{kind}",
            body,
            self.meshes.attention,
            (
                self._stream_shape(bucket),
                *self._step_shapes(bucket)[1:],
                *self.page_arrays,
                *self._combined_shapes(bucket),
                *layer.leaves,
            ),
            (
                *(ROWS, ROWS, ROWS),
                *pages,
                *[PIECES] * received,
                *layer.specs(ATTENTION_RULES),
            ),
            (ROWS, *[PIECES] * self.dispatch.sends, *pages),
            donated=(0, *range(3, 3 + len(pages))),
        )

    def ffn(self, bucket: Bucket, kind: FFNKind) -> Program:
        """(received pieces…, layer…) → (pieces of the result…)."""
        layer, received = self.templates.ffn[kind], self.dispatch.receives
        axes, message = self.meshes.ffn_axes, self.formats[kind]

        def body(*arguments: Array) -> tuple[Array, ...]:
            packed = jnp.concatenate(arguments[:received])
            if not self.broadcast:
                packed = jax.lax.all_gather(packed, axes, axis=0, tiled=True)
            block = layer.merge(arguments[received:])
            share = block(message.unpack(packed, self.dtype), jax.lax.axis_index(axes[0]))
            if not self.broadcast:
                share = jax.lax.psum_scatter(share, axes, scatter_dimension=0, tiled=True)
            return tuple(jnp.split(share.astype(self.dtype), self.combine.sends))

        pieces = PartitionSpec(axes)
        shape = self._shape(
            self.meshes.ffn.size * self.piece_rows(bucket), message.width, dtype=message.word
        )
        return Program(
            f"ffn_{kind}",
            body,
            self.meshes.ffn,
            (*[shape] * received, *layer.leaves),
            (*[pieces] * received, *layer.specs(self.meshes.ffn_rules)),
            (pieces,) * self.combine.sends,
            donated=(),
        )

    def leave(self, bucket: Bucket) -> Program:
        """(x, last_tokens, batch, combined…, head…) → (last_tokens, sampled, logits)."""
        head, received = self.templates.head, self.combine.receives

        def body(x: Array, last: Array, batch: Array, *rest: Array) -> tuple[Array, ...]:
            fields = BatchLayout(bucket.tokens, self.slots).fields(batch[0])
            x = self._add_combined(x, rest[:received])
            return self.sample_step(x, last, fields, rest[received:])

        return Program(
            "leave",
            body,
            self.meshes.attention,
            (
                self._stream_shape(bucket),
                *self._step_shapes(bucket)[:2],
                *self._combined_shapes(bucket),
                *head.leaves,
            ),
            (ROWS, ROWS, ROWS, *[PIECES] * received, *head.specs(ATTENTION_RULES)),
            (ROWS, REPLICATED, ROWS),
            donated=(1,),
        )

    def _attend(
        self, kind: LayerKind, x: Array, pages: Pages, batch: RaggedBatch, leaves: Sequence[Array]
    ) -> tuple[Array, ...]:
        """One layer on the attention mesh; the message leaves in this device's pieces."""
        block = self.templates.attention[kind].merge(leaves)
        x, message, pages = block(x, pages, batch, self.sentinel)
        with jax.named_scope("pack"):
            packed = self.formats[kind.ffn].pack(_share(message, "tp"))
        return x, *jnp.split(packed, self.dispatch.sends), *pages

    def _add_combined(self, x: Array, combined: Sequence[Array]) -> Array:
        """Adds the ffn role's output: rows in pieces, or everybody's share of the same rows."""
        with jax.named_scope("combine"):
            if self.broadcast:
                shares = jnp.stack(list(combined)).astype(jnp.float32)
                rows = jnp.sum(shares, axis=0).astype(x.dtype)
            else:
                rows = jnp.concatenate(list(combined))
            return x + jax.lax.all_gather(rows, "tp", axis=0, tiled=True)

    def _stream_shape(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        rows = self.groups * bucket.tokens
        return self._shape(rows, self.config.d_model, dtype=self.dtype)

    def _combined_shapes(self, bucket: Bucket) -> list[jax.ShapeDtypeStruct]:
        rows = self.meshes.attention.size * self.piece_rows(bucket)
        return [self._shape(rows, self.config.d_model, dtype=self.dtype)] * self.combine.receives


class ColocatedPrograms(_Programs):
    """The whole step in one program: the oracle of every AFD layout, and a product."""

    row_multiple = 1

    @property
    def all_pages(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Global shapes of the pages of all layers."""
        return tuple(
            jax.ShapeDtypeStruct(
                (self.config.layers * array.shape[0], *array.shape[1:]), array.dtype
            )
            for array in self.page_arrays
        )

    def stacked(self) -> list[tuple[LayerKind, int, int]]:
        """Runs of equal layers, whose leaves are stacked along a new first axis."""
        return self.config.runs()

    def step(self, bucket: Bucket) -> Program:
        """(last_tokens, batch, page_table, pages…, embedding…, head…, stacked runs…) →
        (last_tokens, sampled, logits, pages…); the pages are a DP group's of all layers, layer
        after layer: `[dp * layers * pages, …]`."""
        templates, pages_spec = self.templates, [PAGES_SPEC] * len(self.page_arrays)
        parts = [len(pages_spec), len(templates.embedding.leaves), len(templates.head.leaves)]
        for kind, _, _ in self.stacked():
            parts += [len(templates.attention[kind].leaves), len(templates.ffn[kind.ffn].leaves)]

        def body(last: Array, batch: Array, table: Array, *others: Array) -> tuple[Array, ...]:
            context = self.step_context(bucket, batch, table)
            pages, embedding, head, *stacks = _cut(others, parts)
            x = self.embed(context, last, embedding)
            for index, (kind, start, stop) in enumerate(self.stacked()):
                # The scan slices what it goes through, and bits are cheaper to slice.
                attention, ffn = (tuple(map(as_bits, s)) for s in stacks[2 * index :][:2])
                experts, rest = self._part_experts(kind, ffn)
                scanned = (jnp.arange(stop - start, dtype=jnp.int32), attention, rest)
                layer = functools.partial(self._layer, kind, start, context.batch, experts)
                (x, pages), _ = jax.lax.scan(layer, (x, pages), scanned)
            last, sampled, logits = self.sample_step(x, last, context.fields, head)
            return last, sampled, logits, *pages

        arguments = [*templates.embedding.leaves, *templates.head.leaves]
        specs = [
            *templates.embedding.specs(ATTENTION_RULES),
            *templates.head.specs(ATTENTION_RULES),
        ]
        for kind, start, stop in self.stacked():
            for template, rules in (
                (templates.attention[kind], ATTENTION_RULES),
                (templates.ffn[kind.ffn], self.meshes.ffn_rules),
            ):
                arguments += [
                    jax.ShapeDtypeStruct((stop - start, *leaf.shape), leaf.dtype)
                    for leaf in template.leaves
                ]
                specs += [PartitionSpec(None, *spec) for spec in template.specs(rules)]
        return Program(
            "step",
            body,
            self.meshes.attention,
            (*self._step_shapes(bucket), *self.all_pages, *arguments),
            (ROWS, ROWS, ROWS, *pages_spec, *specs),
            (ROWS, REPLICATED, ROWS, *pages_spec),
            donated=(0, *range(3, 3 + len(pages_spec))),
        )

    def _part_experts(
        self, kind: LayerKind, stacks: Sequence[Array]
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        """Leaves of routed experts, all layers' in one row, and the rest; by place in the block.

        The scan would copy a layer's experts out of the stack before every use. The experts' op
        finds the right ones itself.
        """
        experts, rest = {}, {}
        for place, names in enumerate(self.templates.ffn[kind.ffn].dimensions):
            if names[0] == "experts":
                experts[place] = stacks[place].reshape(-1, *stacks[place].shape[2:])
            else:
                rest[place] = stacks[place]
        return experts, rest

    def _layer(
        self,
        kind: LayerKind,
        start: int,
        batch: RaggedBatch,
        experts: dict[int, Array],
        carry: Any,
        scanned: Any,
    ) -> tuple[Any, None]:
        """One layer of a run that begins at layer `start`."""
        (x, pages), (layer, attention, rest) = carry, scanned
        first_page = (start + layer) * self.deployment.cache.pages
        shifted = batch._replace(page_table=batch.page_table + first_page)
        block = self.templates.attention[kind].merge(attention)
        x, message, pages = block(x, pages, shifted, self.sentinel)
        formats, axes = self.formats[kind.ffn], self.meshes.ffn_axes
        packed = jax.lax.all_gather(formats.pack(message), axes[0], axis=0, tiled=True)
        leaves = experts | rest
        ffn_block = self.templates.ffn[kind.ffn].merge(
            [leaves[place] for place in range(len(leaves))]
        )
        share = ffn_block(formats.unpack(packed, self.dtype), jax.lax.axis_index(axes[0]), layer)
        share = jax.lax.psum(share, axes[1])
        rows = jax.lax.psum_scatter(share, axes[0], scatter_dimension=0, tiled=True)
        return (x + rows.astype(x.dtype), pages), None


def _share(message: Any, axis: str) -> Any:
    """This device's equal share of a message that all devices of `axis` hold."""
    ranks, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    if ranks == 1:
        return message

    def cut(rows: Array) -> Array:
        size = rows.shape[0] // ranks
        return jax.lax.dynamic_slice_in_dim(rows, me * size, size)

    return jax.tree.map(cut, message)


def _cut(leaves: Sequence[Array], sizes: Sequence[int]) -> list[tuple[Array, ...]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(tuple(leaves[start : start + size]))
        start += size
    return parts
