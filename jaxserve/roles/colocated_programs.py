"""The program of colocated mode (design, decision 2): a step, scanning over stacked layers."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.message import answer_format, message_formats
from jaxserve.link.dispatch.packed_rows import PackedRows
from jaxserve.mesh import ATTENTION_AXES, ATTENTION_RULES, COLOCATED_FFN_RULES, AnyMesh, placed
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.exchange import make_exchanges
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.expert_programs import Bank, ExpertPrograms, add_load
from jaxserve.roles.layout import BatchLayout, Bucket
from jaxserve.roles.prediction_programs import enter_module, first_pass, leave_module, next_pass
from jaxserve.roles.program import REPLICATED, ROWS, Arrays, Program
from jaxserve.roles.token_programs import TokenPrograms, stacked_pages
from pallas_kernels.input_major import InputMajor
from pallas_kernels.quantize import sliceable

_COUNTS = Bank.counts_spec(ATTENTION_AXES[:1])

_Leaves = tuple[dict[int, Any], dict[int, Any]]
"""Leaves of an attention block and of an ffn block, by their place in the block."""


class ColocatedPrograms(TokenPrograms):
    """The whole step in one program: the oracle of every AFD layout, and a product."""

    templates: ModelTemplates

    def __init__(self, templates: ModelTemplates, deployment: Deployment, mesh: AnyMesh):
        super().__init__(templates, deployment, mesh)
        contract = Contract.of(templates.config, deployment)
        self.formats, self.answers = message_formats(contract), answer_format(contract)
        axes = Axes(*ATTENTION_AXES, rows=("dp",))
        self.exchanges = make_exchanges(
            templates.exchange, axes, self.dtype, combine=contract.combine
        )
        self.banks = tuple(
            Bank(tuple(range(start, stop)), templates.slots)
            for kind, start, stop in self.stacked()
            if kind.ffn.router
        )
        self.stacked_banks = len(self.banks)
        """Number of banks of the step; the bank of prediction modules may follow."""
        if self.config.modules and self.config.predictors[0].ffn.router:
            modules = range(self.config.layers, self.config.all_layers)
            self.banks += (Bank(tuple(modules), templates.slots),)
        self.experts: ExpertPrograms | None = None
        if templates.moe:
            rules, divided = COLOCATED_FFN_RULES, ATTENTION_AXES[:1]
            self.experts = ExpertPrograms(
                templates, deployment.experts, mesh, rules, divided, stacked=True
            )

    @property
    def all_pages(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The pages of all layers: an array for each pool and kind of rows."""
        return tuple(array for pool in self.pools for array in stacked_pages(pool))

    def stacked(self) -> list[tuple[LayerKind, int, int]]:
        """Lists the runs of equal layers, whose leaves are stacked along a new first axis."""
        return self.config.runs()

    def step(self, bucket: Bucket) -> Program:
        """(last_tokens, batch, page_table, pages, counts, tables, embedding, head, runs) →
        (last_tokens, sampled, logits, x, pages…, counts…).

        Counts and tables are those of the banks of experts. x is the residual stream after the last
        layer. A pool's pages are those of all its layers, layer after layer: `[dp * layers * pages,
        …]`. With drafts it returns the lengths last (`TokenPrograms.draw`).
        """
        templates = self.templates

        def body(
            last: Array, batch: Array, table: Array, pages: Pages, counts: Arrays, *rest: Any
        ) -> Arrays:
            tables, (embedding, head), runs = rest
            context = self.step_context(bucket, batch, table)
            x = self.embed(context, last, embedding)
            loads: list[Array] = []
            for (kind, start, stop), run in zip(self.stacked(), runs, strict=True):
                attention, ffn = (tuple(map(sliceable, stack)) for stack in run)
                whole, sliced = self._parted(kind, attention, ffn)
                of_layers = tables[len(loads)] if kind.ffn.router else None
                scanned = (jnp.arange(stop - start, dtype=jnp.int32), sliced, of_layers)
                layer = functools.partial(self._layer, kind, start, context.batch, whole)
                (x, pages), load = jax.lax.scan(layer, (x, pages), scanned)
                if load is not None:
                    loads.append(load)
            last, sampled, logits, *lengths = self.end_step(x, last, context.fields, head, bucket)
            counted = map(add_load, counts, loads)
            return last, sampled, logits, x, *pages, *counted, *lengths

        counts, tables = self._bank_arrays(self.banks[: self.stacked_banks])
        return Program(
            "step",
            body,
            self.mesh,
            (
                *self.step_shapes(bucket),
                self.all_pages,
                counts,
                tables,
                self.leaves(templates.embedding, templates.head),
                [self._layers(kind, stop - start) for kind, start, stop in self.stacked()],
            ),
            (
                *(ROWS, REPLICATED, self.logits_spec, ROWS),
                *self.pages_specs * len(self.pools),
                *[_COUNTS] * len(counts),
                *([ROWS] if bucket.drafts else []),
            ),
            donates=(3, 4),
            cuda_graphs="branches",
        )

    def predict(self, bucket: Bucket) -> Program:
        """All passes of the prediction modules after a step of this bucket.

        (batch, page_table, sampled, lengths, drafts, x, pages, counts, tables, embedding, head,
        modules) → (drafts, pages…, counts…); counts and tables are those of the modules' bank,
        where they have experts.
        """
        templates, kind = self.templates, self.config.layer(self.config.layers)
        tokens, modules = bucket.tokens, self.config.modules
        longest = bucket.pages * self.deployment.cache.page_size

        def body(
            batch: Array, table: Array, sampled: Array, lengths: Array, drafts: Array, *rest: Any
        ) -> Arrays:
            (x,), pages, counts, tables, (embedding, head), stacks = rest
            prediction, attention, ffn = (tuple(map(sliceable, stack)) for stack in stacks)
            whole, sliced = self._parted(kind, attention, ffn)
            slots = tables[0] if tables else None
            samples = BatchLayout(tokens, self.slots).fields(batch[0])["sample"] > 0
            own = sampled[jax.lax.axis_index("dp")]
            start = first_pass(self, tokens, x, batch[0], own, lengths[0], head)
            loads = jnp.zeros((modules, self.config.experts), jnp.int32)
            found = []
            for number in range(bucket.drafts):
                index = min(number, modules - 1)
                module = [leaf[index] for leaf in prediction]
                x = enter_module(self, tokens, start, embedding, module)
                context = self.step_context(bucket, start.batch[None], table)
                scanned = jax.tree.map(lambda leaf, index=index: leaf[index], (sliced, slots))
                layer = functools.partial(
                    self._layer, kind, self.config.layers, context.batch, whole
                )
                (x, pages), load = layer((x, pages), (jnp.int32(index), *scanned))
                if load is not None:
                    loads = loads.at[index].add(load)
                ahead = min(number + 1, modules)
                hidden, draft = leave_module(self, tokens, x, start.batch, ahead, module, head)
                found.append(jnp.where(samples, draft, drafts[0, :, number]))
                again = number + 1 >= modules
                start = next_pass(
                    self, tokens, hidden, start.batch, draft, again=again, longest=longest
                )
            counted = (add_load(count, loads) for count in counts)
            return jnp.stack(found, axis=1)[None], *pages, *counted

        counts, tables = self._bank_arrays(self.banks[self.stacked_banks :])
        state = self.groups, self.slots
        return Program(
            "predict",
            body,
            self.mesh,
            (
                *self.step_shapes(bucket)[1:],
                self.shape(*state, 1 + bucket.drafts, spec=REPLICATED),
                self.shape(*state),
                self.shape(*state, bucket.drafts),
                self.stream_shapes(bucket),
                self.all_pages,
                counts,
                tables,
                self.leaves(templates.embedding, templates.head),
                (
                    templates.prediction.arrays(self.mesh, ATTENTION_RULES, modules),
                    *self._layers(kind, modules),
                ),
            ),
            (ROWS, *self.pages_specs * len(self.pools), *[_COUNTS] * len(counts)),
            donates=(6, 7),
        )

    def _bank_arrays(
        self, banks: Sequence[Bank]
    ) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]:
        """Shapes of the counts and the tables of these banks."""
        counts = placed(self.mesh, [bank.counts for bank in banks], [_COUNTS] * len(banks))
        tables = placed(self.mesh, [bank.table for bank in banks], [REPLICATED] * len(banks))
        return counts, tables

    def _layers(
        self, kind: LayerKind, count: int
    ) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]:
        """Shapes of the stacked leaves of attention and ffn in layers of one kind."""
        attention, ffn = self.templates.attention[kind], self.templates.ffn[kind.ffn]
        return (
            attention.arrays(self.mesh, ATTENTION_RULES, count),
            ffn.arrays(self.mesh, COLOCATED_FFN_RULES, count),
        )

    def stream_shapes(self, bucket: Bucket) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape of x, as `step` returns it."""
        rows = self.groups * bucket.tokens
        return (self.shape(rows, self.config.d_model, dtype=self.dtype),)

    def stream(self, parts: Sequence[Array]) -> Float[Array, "tokens d_model"]:
        """Returns the residual stream, which is x itself."""
        return parts[0]

    def _parted(self, kind: LayerKind, *blocks: Sequence[Array]) -> tuple[_Leaves, _Leaves]:
        """Divides the leaves of attention and ffn into those that stay whole stacks, and those that
        the scan slices; by their place in the block.

        The scan would copy a layer's experts, and matrices that lie input by input, before every
        use. Products with these take the whole stack and find their layer; experts of all layers
        are in one row.
        """
        whole: _Leaves = ({}, {})
        sliced: _Leaves = ({}, {})
        templates = self.templates.attention[kind], self.templates.ffn[kind.ffn]
        for number, (template, stacks) in enumerate(zip(templates, blocks, strict=True)):
            for place, stack in enumerate(stacks):
                if template.leaves[place].of_slots:
                    whole[number][place] = stack.reshape(-1, *stack.shape[2:])
                elif template.leaves[place].input_major:
                    whole[number][place] = InputMajor(stack)
                else:
                    sliced[number][place] = stack
        return whole, sliced

    def _layer(
        self,
        kind: LayerKind,
        start: int,
        batch: RaggedBatch,
        whole: _Leaves,
        carry: Any,
        scanned: Any,
    ) -> tuple[Any, Array | None]:
        """Runs one layer of a run that begins at layer `start`."""
        (x, pages), (layer, sliced, table) = carry, scanned
        attention, ffn = (
            [_of_layer(leaves[place], layer) for place in range(len(leaves))]
            for leaves in map(operator.or_, whole, sliced)
        )
        pool, batch = self.pool(kind), self.of_kind(batch, kind)
        first_page = (pool.layers.index(start) + layer) * pool.pages
        shifted = batch._replace(page_table=batch.page_table + first_page)
        block = self.templates.attention[kind].merge(attention)
        first = self.pools.index(pool) * len(pool.arrays)
        end = first + len(pool.arrays)
        x, message, own = block(x, pages[first:end], shifted, self.sentinel)
        pages = *pages[:first], *own, *pages[end:]
        formats = self.formats[kind.ffn.kind]
        ffn_block = self.templates.ffn[kind.ffn].merge(ffn)
        packing, packed = PackedRows(formats, self.dtype), formats.pack(message)
        rows, load = self.exchanges[kind.ffn.kind](packed, ffn_block, packing, table, layer)
        # Rounded as a link would round them.
        return (x + self.answers.total([self.answers.pack(rows)], x.dtype), pages), load


def _of_layer(leaf: Array | InputMajor, layer: Array) -> Array | InputMajor:
    return InputMajor(leaf.values, layer) if isinstance(leaf, InputMajor) else leaf
