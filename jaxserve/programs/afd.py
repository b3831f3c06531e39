"""The programs of attention-FFN disaggregation (design, decision 1).

`enter` (embed, first attend), `attend` and `leave` (last combine, head, sample) on the attention
mesh, `ffn` on the ffn mesh; every layer of a kind shares one of each.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.attention.batch import RaggedBatch
from jaxserve.attention.kv_cache import PAGES_SPEC, Pages
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFNKind, LayerKind
from jaxserve.link.message import row_multiple
from jaxserve.link.route import Route, combine_route, dispatch_route
from jaxserve.mesh import ATTENTION_RULES, Submeshes
from jaxserve.model import ModelTemplates
from jaxserve.programs.program import PIECES, REPLICATED, ROWS, Program, Programs, cut
from jaxserve.step import BatchLayout, Bucket


def step_multiple(deployment: Deployment) -> int:
    """Tokens a DP group must be a multiple of this, so that all pieces of a message are equal."""
    if deployment.mode == "colocated":
        return 1
    multiple, groups = deployment.attention.devices, deployment.attention.dp
    if deployment.link.route == "trampoline":
        multiple = row_multiple(multiple, deployment.ffn.devices)
    return multiple // math.gcd(multiple, groups)


class AFDPrograms(Programs):
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
            pages, table_leaves, leaves = cut(rest, cuts)
            context = self.step_context(bucket, batch, table)
            x = self.embed(context, last, table_leaves)
            return self._attend(kind, x, pages, context.batch, leaves)

        pages = [PAGES_SPEC] * len(self.page_arrays)
        return Program(
            f"enter_{kind}",
            body,
            self.meshes.attention,
            (
                *self.step_shapes(bucket),
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
            pages, combined, leaves = cut(rest, cuts)
            context = self.step_context(bucket, batch, table)
            return self._attend(kind, self._add_combined(x, combined), pages, context.batch, leaves)

        pages = [PAGES_SPEC] * len(self.page_arrays)
        return Program(
            f"attend_{kind}",
            body,
            self.meshes.attention,
            (
                self._stream_shape(bucket),
                *self.step_shapes(bucket)[1:],
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
        shape = self.shape(
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

    def load(self, bucket: Bucket) -> Program:
        """(pieces…) → the tokens of this device's pieces that go to each expert,
        `[devices, 1, experts]`. Runs only in steps that are measured."""
        message, sends = self.formats["moe"], self.dispatch.sends

        def body(*pieces: Array) -> Array:
            experts = message.unpack(jnp.concatenate(pieces), self.dtype).experts
            assert experts is not None
            return jnp.bincount(experts.reshape(-1), length=self.sentinel)[None, None]

        shape = self.shape(
            self.meshes.attention.size * self.piece_rows(bucket), message.width, dtype=message.word
        )
        return Program(
            "load",
            body,
            self.meshes.attention,
            (shape,) * sends,
            (PIECES,) * sends,
            PIECES,
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
                *self.step_shapes(bucket)[:2],
                *self._combined_shapes(bucket),
                *head.leaves,
            ),
            (ROWS, ROWS, ROWS, *[PIECES] * received, *head.specs(ATTENTION_RULES)),
            (ROWS, REPLICATED, ROWS),
            donated=(),
        )

    def stream_shapes(self, bucket: Bucket) -> tuple[jax.ShapeDtypeStruct, ...]:
        """(x, combined…), as `leave` takes them."""
        return self._stream_shape(bucket), *self._combined_shapes(bucket)

    def stream_specs(self) -> tuple[PartitionSpec, ...]:
        """Of (x, combined…)."""
        return ROWS, *[PIECES] * self.combine.receives

    def stream(self, parts: Sequence[Array]) -> Float[Array, "tokens d_model"]:
        """x with the last layer's output."""
        return self._add_combined(parts[0], parts[1:])

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
        return self.shape(rows, self.config.d_model, dtype=self.dtype)

    def _combined_shapes(self, bucket: Bucket) -> list[jax.ShapeDtypeStruct]:
        rows = self.meshes.attention.size * self.piece_rows(bucket)
        return [self.shape(rows, self.config.d_model, dtype=self.dtype)] * self.combine.receives


def _share(message: Any, axis: str) -> Any:
    """This device's equal share of a message that all devices of `axis` hold."""
    ranks, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    if ranks == 1:
        return message

    def cut(rows: Array) -> Array:
        size = rows.shape[0] // ranks
        return jax.lax.dynamic_slice_in_dim(rows, me * size, size)

    return jax.tree.map(cut, message)
