"""The programs of the attention role (design, decision 1).

`enter` (embed, first attend), `attend` and `leave` (last combine, head, sample); every layer of a
kind shares one of each. A message leaves as one array with a piece on each attention device, and
its answer comes back likewise (`link/contract.py`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind
from jaxserve.link.contract import Contract
from jaxserve.link.message import answer_format, message_formats
from jaxserve.mesh import ATTENTION_RULES, AnyMesh, cached_sharding
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import PAGES_SPEC, Pages
from jaxserve.model.blocks import ModelTemplates
from jaxserve.roles.layout import BatchLayout, Bucket
from jaxserve.roles.prediction_programs import (
    Pass,
    enter_module,
    first_pass,
    leave_module,
    next_pass,
)
from jaxserve.roles.program import PIECES, REPLICATED, ROWS, Program, cut
from jaxserve.roles.token_programs import TokenPrograms


class AttentionPrograms(TokenPrograms):
    """What runs on the attention mesh of a deployment with a separate ffn role."""

    def __init__(self, templates: ModelTemplates, deployment: Deployment, mesh: AnyMesh):
        super().__init__(templates, deployment, mesh)
        self.contract = Contract.of(templates.config, deployment)
        self.formats, self.answers = message_formats(self.contract), answer_format(self.contract)
        self._shapes: dict[Bucket, Any] = {}

    def enter(self, bucket: Bucket, kind: LayerKind) -> Program:
        """(last_tokens, page_table, batch, pages…, embedding…, layer…) → (x, message, pages…,
        shared…): the last are what `attend` takes in place of the batch."""
        embedding, layer = self.templates.embedding, self.templates.attention[kind]
        cuts = (len(self.page_arrays), len(embedding.leaves), len(layer.leaves))

        def body(last: Array, table: Array, batch: Array, *rest: Array) -> tuple[Array, ...]:
            pages, table_leaves, leaves = cut(rest, cuts)
            context = self.step_context(bucket, batch, table)
            x = self.embed(context, last, table_leaves)
            made = self._attend(kind, x, pages, context.batch, leaves)
            return *made, *jax.tree.leaves(_without_table(context.batch))

        pages = [PAGES_SPEC] * len(self.page_arrays)
        shared, (last, batch, table) = (
            jax.tree.leaves(self._shared(bucket)),
            self.step_shapes(bucket),
        )
        return Program(
            f"enter_{kind}",
            body,
            self.mesh,
            (last, table, batch, *self.page_arrays, *embedding.leaves, *layer.leaves),
            (
                *(ROWS, ROWS, ROWS),
                *pages,
                *embedding.specs(ATTENTION_RULES),
                *layer.specs(ATTENTION_RULES),
            ),
            (ROWS, PIECES, *pages, *[ROWS] * len(shared)),
            donated=tuple(range(3, 3 + len(pages))),
            cuda_graphs="off",
        )

    def attend(self, bucket: Bucket, kind: LayerKind) -> Program:
        """(x, page_table, shared…, pages…, combined…, layer…) → (x, message, pages…)."""
        layer = self.templates.attention[kind]
        shared, form = jax.tree.flatten(self._shared(bucket))
        answers = self._answer_shapes(bucket)
        cuts = (len(shared), len(self.page_arrays), len(answers), len(layer.leaves))

        def body(x: Array, table: Array, *rest: Array) -> tuple[Array, ...]:
            of_batch, pages, combined, leaves = cut(rest, cuts)
            batch = jax.tree.unflatten(form, of_batch)._replace(page_table=table[0])
            return self._attend(kind, self._add_combined(x, *combined), pages, batch, leaves)

        pages = [PAGES_SPEC] * len(self.page_arrays)
        return Program(
            f"attend_{kind}",
            body,
            self.mesh,
            (
                self._stream_shape(bucket),
                self.step_shapes(bucket)[2],
                *shared,
                *self.page_arrays,
                *answers,
                *layer.leaves,
            ),
            (
                *(ROWS, ROWS),
                *[ROWS] * len(shared),
                *pages,
                *[PIECES] * len(answers),
                *layer.specs(ATTENTION_RULES),
            ),
            (ROWS, PIECES, *pages),
            donated=(0, *range(2 + len(shared), 2 + len(shared) + len(pages))),
            cuda_graphs="off",
        )

    def first_pass(self, bucket: Bucket) -> Program:
        """(batch, sampled, lengths, x, combined…, head…) → (hidden, batch of the first pass)."""
        head, tokens = self.templates.head, bucket.tokens
        streams = self.stream_shapes(bucket)
        cuts = (len(streams), len(head.leaves))

        def body(batch: Array, sampled: Array, lengths: Array, *rest: Array) -> tuple[Array, ...]:
            parts, leaves = cut(rest, cuts)
            own, x = sampled[jax.lax.axis_index("dp")], self.stream(parts)
            start = first_pass(self, tokens, x, batch[0], own, lengths[0], leaves)
            return start.hidden, start.batch[None]

        return Program(
            "first_pass",
            body,
            self.mesh,
            (
                self.step_shapes(bucket)[1],
                self.shape(self.groups, self.slots, 1 + bucket.drafts),
                self.shape(self.groups, self.slots),
                *streams,
                *head.leaves,
            ),
            (ROWS, REPLICATED, ROWS, *self.stream_specs(), *head.specs(ATTENTION_RULES)),
            (ROWS, ROWS),
            donated=(),
        )

    def predict(self, bucket: Bucket) -> Program:
        """A module's part of a pass before its FFN: (hidden, batch, page_table, pages…, embedding…,
        module…, layer…) → (x, message, pages…)."""
        kind = self.config.kind(self.config.layers)
        embedding, module = self.templates.embedding, self.templates.prediction
        layer, places = self.templates.attention[kind], len(self.page_arrays)
        cuts = (places, len(embedding.leaves), len(module.leaves), len(layer.leaves))

        def body(hidden: Array, batch: Array, table: Array, *rest: Array) -> tuple[Array, ...]:
            pages, table_leaves, own, leaves = cut(rest, cuts)
            start = Pass(hidden, batch[0])
            x = enter_module(self, bucket.tokens, start, table_leaves, own)
            context = self.step_context(bucket, batch, table)
            return self._attend(kind, x, pages, context.batch, leaves)

        return Program(
            "predict",
            body,
            self.mesh,
            (
                self._stream_shape(bucket),
                *self.step_shapes(bucket)[1:],
                *self.page_arrays,
                *embedding.leaves,
                *module.leaves,
                *layer.leaves,
            ),
            (
                *(ROWS, ROWS, ROWS),
                *[PAGES_SPEC] * places,
                *embedding.specs(ATTENTION_RULES),
                *module.specs(ATTENTION_RULES),
                *layer.specs(ATTENTION_RULES),
            ),
            (ROWS, PIECES, *[PAGES_SPEC] * places),
            donated=(0, *range(3, 3 + places)),
            cuda_graphs="off",
        )

    def next_pass(self, bucket: Bucket, *, again: bool) -> Program:
        """The end of a pass and the beginning of the next: (numbers, batch, drafts, x, combined…,
        module…, head…) → (hidden, batch, drafts).

        The numbers are int32 [3]: the pass's, counted from 0; by how much its draft's position is
        beyond the batch's KV lengths; and the positions that the page table has room for.
        """
        module, head, tokens = self.templates.prediction, self.templates.head, bucket.tokens
        streams = self.stream_shapes(bucket)
        cuts = (len(streams), len(module.leaves), len(head.leaves))

        def body(numbers: Array, batch: Array, drafts: Array, *rest: Array) -> tuple[Array, ...]:
            parts, own, leaves = cut(rest, cuts)
            number, ahead, longest = numbers
            x = self.stream(parts)
            hidden, draft = leave_module(self, tokens, x, batch[0], ahead, own, leaves)
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
                self.shape(3),
                self.step_shapes(bucket)[1],
                self.shape(self.groups, self.slots, bucket.drafts),
                *streams,
                *module.leaves,
                *head.leaves,
            ),
            (
                *(REPLICATED, ROWS, ROWS, *self.stream_specs()),
                *module.specs(ATTENTION_RULES),
                *head.specs(ATTENTION_RULES),
            ),
            (ROWS, ROWS, ROWS),
            donated=(),
        )

    def leave(self, bucket: Bucket) -> Program:
        """(x, last_tokens, batch, combined…, head…) → (last_tokens, sampled, logits); with drafts
        the lengths, too (`TokenPrograms.verify_step`)."""
        head, answers = self.templates.head, self._answer_shapes(bucket)
        cuts = (len(answers), len(head.leaves))

        def body(x: Array, last: Array, batch: Array, *rest: Array) -> tuple[Array, ...]:
            combined, leaves = cut(rest, cuts)
            fields = BatchLayout(bucket.tokens, self.slots).fields(batch[0])
            return self.end_step(self._add_combined(x, *combined), last, fields, leaves, bucket)

        return Program(
            "leave",
            body,
            self.mesh,
            (
                self._stream_shape(bucket),
                *self.step_shapes(bucket)[:2],
                *answers,
                *head.leaves,
            ),
            (ROWS, ROWS, ROWS, *[PIECES] * len(answers), *head.specs(ATTENTION_RULES)),
            (ROWS, REPLICATED, self.logits_spec, *([ROWS] if bucket.drafts else [])),
            donated=(),
            cuda_graphs="branches",
        )

    def stream_shapes(self, bucket: Bucket) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of (x, combined…), the arguments of `leave` that hold the residual stream."""
        return self._stream_shape(bucket), *self._answer_shapes(bucket)

    def stream_specs(self) -> tuple[PartitionSpec, ...]:
        """Partition specs of (x, combined…)."""
        return ROWS, *[PIECES] * self.contract.instances

    def stream(self, parts: Sequence[Array]) -> Float[Array, "tokens d_model"]:
        """The residual stream: x plus the last layer's FFN output."""
        return self._add_combined(*parts)

    def _attend(
        self, kind: LayerKind, x: Array, pages: Pages, batch: RaggedBatch, leaves: Sequence[Array]
    ) -> tuple[Array, ...]:
        """One layer on the attention mesh; the message leaves as this device's piece."""
        block = self.templates.attention[kind].merge(leaves)
        x, message, pages = block(x, pages, batch, self.sentinel)
        with jax.named_scope("pack"):
            packed = self.formats[kind.ffn].pack(_share(message, "tp"))
        return x, packed, *pages

    def _shared(self, bucket: Bucket) -> Any:
        """What layers share of a batch: a `RaggedBatch` of shapes, without its page table."""
        if bucket not in self._shapes:

            def shared(batch: Array, table: Array) -> Any:
                return _without_table(self.step_context(bucket, batch, table).batch)

            mapped = jax.shard_map(
                shared, mesh=self.mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False
            )
            rows = cached_sharding(self.mesh, ROWS)
            arrays = [array.update(sharding=rows) for array in self.step_shapes(bucket)[1:]]
            self._shapes[bucket] = jax.eval_shape(mapped, *arrays)
        return self._shapes[bucket]

    def _stream_shape(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        rows = self.groups * bucket.tokens
        return self.shape(rows, self.config.d_model, dtype=self.dtype)

    def _answer_shapes(self, bucket: Bucket) -> list[jax.ShapeDtypeStruct]:
        """Of the answer, an array an instance of the ffn mesh."""
        rows = self.groups * bucket.tokens
        one = self.shape(rows, self.answers.width, dtype=self.answers.dtype)
        return [one] * self.contract.instances

    def _add_combined(self, x: Array, *combined: Array) -> Float[Array, "tokens d_model"]:
        """The residual stream with the ffn role's answer, of which this device has its piece's
        rows; of several instances the sum."""
        with jax.named_scope("combine"):
            shares = [jax.lax.all_gather(part, "tp", axis=0, tiled=True) for part in combined]
            return x + self.answers.total(shares, x.dtype)


def _without_table(batch: RaggedBatch) -> Any:
    """The page table is the host's array; None is no leaf."""
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
