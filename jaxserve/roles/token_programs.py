"""Entrance and exit of a step, shared by the roles that hold embedding and head.

Called by `attention_programs.py` and `colocated.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind
from jaxserve.link.dispatch.put import fast_put
from jaxserve.mesh import ATTENTION_RULES, AnyMesh, cached_sharding, placed
from jaxserve.model.attention.batch import RaggedBatch, positions, ragged_batch
from jaxserve.model.attention.family import layer_table, with_exchange, with_shared
from jaxserve.model.attention.kv_cache import PAGES_SPEC, PagePool, page_pools
from jaxserve.model.blocks import AttentionTemplates
from jaxserve.model.module import Template
from jaxserve.model.sampler import SamplerState, sample_and_largest
from jaxserve.roles.compilation import ROWS
from jaxserve.roles.layout import NO_TOKEN, Bucket
from jaxserve.roles.step_arrays import FROM_DEVICE, REJECTED, BatchLayout, LaneState
from jaxserve.roles.step_plan import StepPlan
from pallas_kernels.quantize.words import PoolLayout

FEW_SLOTS = 4
"""Slots that are computed alone where no more sample (`of_sampling`)."""


class StepContext(NamedTuple):
    """Inputs that a step's attention layers share; built from its arrays inside each program."""

    batch: RaggedBatch
    fields: dict[str, Array]


class TokenPrograms:
    """Shapes of a step, and its first and last part on the mesh that has embedding and head.

    Attributes:
      stacked: whether an array of `all_pages` has the pages of all layers of its pool, or of one.
      shared: where page arrays lie in pools of other shapes (`both_roles.py`); None: nowhere.
    """

    stacked = True
    shared: PoolLayout | None = None

    def __init__(self, templates: AttentionTemplates, deployment: Deployment, mesh: AnyMesh):
        self.templates = templates
        self.config = templates.config
        self.dtype = templates.dtype
        self.deployment = deployment
        self.mesh = cast(Mesh, mesh)  # an abstract mesh suffices to compute shapes
        self.slots = deployment.scheduler.slots
        self.groups = deployment.attention.dp
        self.sentinel = self.config.experts
        self.pools = [
            pool._replace(arrays=placed(mesh, pool.arrays, [PAGES_SPEC] * len(pool.arrays)))
            for pool in page_pools(self.config, deployment)
        ]
        self._pool_of = {
            self.config.layer(layer).attention: pool for pool in self.pools for layer in pool.layers
        }
        self.tables = len(self.pools[0].pages)
        """Page tables of a step, whose entries of a page lie side by side."""
        self.divided = self.config.platform == "cpu" and deployment.attention.tp > 1
        """Whether devices keep their columns of the logits until a draw needs all; greedy tokens do
        not. Not on GPUs, where conditions are nodes of a graph and may hold no collectives."""
        self.logits_spec = PartitionSpec("dp", "tp") if self.divided else ROWS

    def logits_shape(self, rows: int) -> jax.ShapeDtypeStruct:
        """Global shape of the logits of this number of rows, as a step leaves them."""
        columns = self.config.vocab
        if self.divided:
            columns += -columns % self.deployment.attention.tp
        return self.shape(rows, columns, dtype=jnp.float32, spec=self.logits_spec)

    def layout(self, tokens: int) -> BatchLayout:
        """Returns the layout of the batch array of steps with this number of tokens."""
        return BatchLayout(tokens, self.slots, self.config.modules)

    def step_context(
        self, bucket: Bucket, batch: Array, page_table: Array, last_tokens: Array | None = None
    ) -> StepContext:
        """Returns the DP group's view of the step's arrays `[1, width]`, `[1, slots, pages]`.

        Args:
          last_tokens: `[1, slots]`, the tokens that the batch has as `FROM_DEVICE`; None: it has
            none.
        """
        fields = BatchLayout(bucket.tokens, self.slots).fields(batch[0])
        ragged = ragged_batch(
            fields["query_start"], fields["kv_length"], page_table[0], bucket.tokens
        )
        if bucket.spread:
            ragged = with_exchange(ragged, fields["spread"], self.deployment.cache.page_size)
        if last_tokens is not None:
            ids, slot = fields["token_ids"], ragged.sequence_of_token
            ids = jnp.where(ids == FROM_DEVICE, last_tokens[0][slot], ids)
            fields = fields | {"token_ids": ids}
        if any(kind.ffn.router and kind.ffn.router.token_table for kind in self.config.kinds()):
            ragged = ragged._replace(token_ids=fields["token_ids"])
        if self.config.recurrent and self.deployment.drafts:
            ragged = ragged._replace(drafts=jnp.maximum(fields["sample"] - 1, 0))
        piece = cached_sharding(self.mesh, PAGES_SPEC).shard_shape
        caches = {}
        for kind in self.config.kinds():
            arrays = self.pool(kind).arrays
            pages = [jax.ShapeDtypeStruct(piece(a.shape), a.dtype) for a in arrays]
            caches[kind.attention] = self.of_kind(ragged, kind).page_table, pages
        return StepContext(with_shared(ragged, self.dtype, caches), fields)

    @property
    def all_pages(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The pages of all layers: an array for each pool and kind of rows, in which a DP group's
        pages lie layer after layer."""
        return tuple(
            array.update(shape=(len(pool.layers) * array.shape[0], *array.shape[1:]))
            for pool in self.pools
            for array in pool.arrays
        )

    def pool(self, kind: LayerKind) -> PagePool:
        """Returns the pool that holds the pages of layers of a kind."""
        return self._pool_of[kind.attention]

    def pages_specs(self, *pools: PagePool) -> tuple[PartitionSpec, ...]:
        """Partition specs of the pages of these pools."""
        return tuple(PAGES_SPEC for pool in pools for _ in pool.arrays)

    def of_kind(self, batch: RaggedBatch, kind: LayerKind) -> RaggedBatch:
        """Returns the batch for layers of a kind, with the page tables of their pool."""
        tables = batch.page_table.reshape(self.slots, -1, self.tables)
        own = {*self.pool(kind).tables}
        batch = batch._replace(page_table=tables[..., min(own)], ring_table=tables[..., max(own)])
        return layer_table(kind.attention, batch, self.deployment.cache.page_size)

    def embed(
        self, context: StepContext, leaves: Sequence[Array]
    ) -> Float[Array, "tokens residual"]:
        """Embeds the step's tokens."""
        with jax.named_scope("embed"):
            return self.templates.embedding.merge(leaves)(context.fields["token_ids"])

    def end_step(
        self,
        x: Float[Array, "tokens residual"],
        last_tokens: Int[Array, "1 slots"],
        fields: dict[str, Array],
        leaves: Sequence[Array],
        bucket: Bucket,
    ) -> tuple[Array, ...]:
        """Applies head and sampler to the last tokens of every slot: the last one, and before it as
        many as the bucket has drafts. `sample_few` takes the steps of fewer tokens than slots.

        Returns the lane's last tokens, int32 `[1, slots]`; all DP groups' sampled tokens, `[groups,
        slots]` or with drafts `[groups, slots, 1 + drafts]`, so that any process of the role can
        read them; the logits of all sampled tokens, slot by slot; and with drafts the lengths
        (`draw`).
        """
        if bucket.is_small(self.slots):
            return self.sample_few(x, last_tokens, fields, leaves)
        row = sampled_rows(fields, 1 + bucket.drafts)

        def of_slots(slots: Any) -> Float[Array, "some rows columns"]:
            found = self._logits(x[row[slots].reshape(-1)], leaves)
            return found.reshape(-1, row.shape[1], found.shape[1])

        logits = self.of_sampling(fields["sample"] > 0, of_slots)
        logits = logits.reshape(row.size, -1)
        last, sampled, *lengths = self.draw(logits, last_tokens, fields, bucket.drafts)
        return last, sampled, logits, *lengths

    def sample_few(
        self,
        x: Float[Array, "tokens residual"],
        last_tokens: Int[Array, "1 slots"],
        fields: dict[str, Array],
        leaves: Sequence[Array],
    ) -> tuple[Int[Array, "1 slots"], Int[Array, "groups slots"], Float[Array, "tokens vocab"]]:
        """Returns the results of `end_step`, by head and sampler on every token: there are fewer
        tokens than slots. The logits, too, are those of the tokens."""
        tokens, logits = x.shape[0], self._logits(x, leaves)
        slot, _, _ = positions(fields["query_start"], fields["kv_length"], tokens)
        drawn = drawn_tokens(logits, sampler_state(fields, slot), self.config.vocab)
        row = jnp.clip(fields["query_start"][1:] - 1, 0, tokens - 1)
        last = jnp.where(fields["sample"] > 0, drawn[row], last_tokens[0])[None]
        return last, self.of_all_groups(last[0]), logits

    def draw(
        self,
        logits: Float[Array, "sampled vocab"],
        last_tokens: Int[Array, "1 slots"],
        fields: dict[str, Array],
        drafts: int,
    ) -> tuple[Array, ...]:
        """Draws from the logits, and accepts drafts up to the first that differs from the sampled
        token. With drafts `fields["sample"]` says how many of a slot's last 1 + drafts tokens the
        step has fed.

        A draw depends on logits, seed and position alone. The tokens before a rejected draft, and
        the token in its place, are therefore those of steps without drafts, greedy or not (Daliri
        et al., 2024, "Coupling without communication and drafter-invariant speculative decoding").

        Returns the lane's last tokens after the step and all DP groups' sampled tokens, with
        `REJECTED` behind the accepted ones; with drafts also the number of each slot's accepted
        tokens in the cache, `[1, slots]`.
        """
        slots, rows, counts = self.slots, 1 + drafts, fields["sample"]
        if not drafts:
            drawn = drawn_tokens(logits, sampler_state(fields), self.config.vocab)
            last = jnp.where(counts > 0, drawn, last_tokens[0])[None]
            return last, self.of_all_groups(last[0])
        offset = jnp.arange(rows, dtype=jnp.int32)[None]
        position = fields["kv_length"][:, None] - counts[:, None] + 1 + offset
        state = sampler_state(fields, jnp.repeat(jnp.arange(slots, dtype=jnp.int32), rows))
        state = state._replace(position=position.reshape(-1))
        drawn = drawn_tokens(logits, state, self.config.vocab).reshape(slots, rows)
        draft = fields["token_ids"][sampled_rows(fields, rows)[:, 1:]]
        holds = (draft == drawn[:, :-1]) & (offset[:, 1:] < counts[:, None])
        accepted = jnp.sum(jnp.cumprod(holds.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        samples = counts > 0
        last = jnp.take_along_axis(drawn, accepted[:, None], axis=1)[:, 0]
        last = jnp.where(samples, last, last_tokens[0])
        sampled = jnp.where(samples[:, None] & (offset <= accepted[:, None]), drawn, REJECTED)
        rejected = jnp.where(samples, counts - 1 - accepted, 0)
        lengths = fields["kv_length"] - rejected
        return last[None], self.of_all_groups(sampled), lengths[None]

    def of_all_groups(self, own: Array) -> Array:
        """Returns the arrays of all DP groups, stacked."""
        return jax.lax.all_gather(own, "dp")

    def _logits(
        self, x: Float[Array, "rows residual"], leaves: Sequence[Array]
    ) -> Float[Array, "rows columns"]:
        """Computes a step's logits: all columns, or this device's (`divided`)."""
        with jax.named_scope("head"):
            head = self.templates.head.merge(leaves)
            logits: Array = head.own_columns(x) if self.divided else head(x)
        return logits

    def of_sampling(self, samples: Bool[Array, " slots"], compute: Callable[[Any], Array]) -> Array:
        """Returns `compute(slots)`, a row for each slot that samples. Where `FEW_SLOTS` or fewer
        sample, as in chunks of one prompt, CPUs compute these alone; other rows are then zero."""
        if self.config.platform != "cpu":  # GPUs would wait for the condition
            return compute(slice(None))
        few = jnp.argsort(~samples)[:FEW_SLOTS]

        def of_few() -> Array:
            own = compute(few)
            return jnp.zeros((len(samples), *own.shape[1:]), own.dtype).at[few].set(own)

        return jax.lax.cond(jnp.sum(samples) > FEW_SLOTS, lambda: compute(slice(None)), of_few)

    def stream_shapes(self, bucket: Bucket) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Global shapes of the arrays that hold the residual stream after the last layer."""
        rows = self.groups * bucket.tokens
        return (self.shape(rows, self.config.residual_width, dtype=self.dtype),)

    def stream(self, parts: Sequence[Array]) -> Float[Array, "tokens residual"]:
        """Assembles the residual stream from these parts."""
        return parts[0]

    def shape(
        self, *shape: int, dtype: Any = jnp.int32, spec: PartitionSpec = ROWS
    ) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of an array; by default int32, a row a DP group."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=cached_sharding(self.mesh, spec))

    def leaves(self, *blocks: Template) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
        """The blocks' weights on the attention mesh."""
        return [block.arrays(self.mesh, ATTENTION_RULES) for block in blocks]

    def step_shapes(self, bucket: Bucket) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of last_tokens, batch and page_table."""
        return (
            self.shape(self.groups, self.slots),
            self.shape(self.groups, self.layout(bucket.tokens).width),
            self.shape(self.groups, self.slots, bucket.pages * self.tables),
        )


def sampled_rows(fields: dict[str, Array], rows: int) -> Int[Array, "slots rows"]:
    """Returns the rows of a step that are followed by sampling, `rows` for each slot; entries
    beyond a slot's own have no meaning."""
    counts, end = fields["sample"], fields["query_start"][1:]
    offset = jnp.arange(rows, dtype=jnp.int32)[None]
    row = jnp.maximum(end[:, None] - jnp.maximum(counts, 1)[:, None] + offset, 0)
    return jnp.minimum(row, fields["token_ids"].shape[0] - 1)


def sampler_state(fields: dict[str, Array], slots: Any = slice(None)) -> SamplerState:
    """Builds the sampler's state from a batch: a row for each of `slots`, for the token after its
    last one."""

    def bits(name: str) -> Float[Array, " some"]:
        return jax.lax.bitcast_convert_type(fields[name][slots], jnp.float32)

    return SamplerState(
        temperature=bits("temperature"),
        top_k=fields["top_k"][slots],
        top_p=bits("top_p"),
        min_p=bits("min_p"),
        seed=fields["seed"][slots].astype(jnp.uint32),
        position=fields["kv_length"][slots],
    )


def drawn_tokens(
    logits: Float[Array, "rows columns"], state: SamplerState, vocab: int
) -> Int[Array, " rows"]:
    """Draws a token for every row from all logits, or from this device's columns. Rows whose logits
    are not finite get `NO_TOKEN`."""
    with jax.named_scope("sample"):
        drawn, largest = sample_and_largest(logits, state, vocab)
        return jnp.where(jnp.isfinite(largest), drawn, NO_TOKEN)


class KVArrays(NamedTuple):
    """A worker's pages, as hand-offs read and write them between its steps (`page_transfer.py`)."""

    programs: TokenPrograms
    """Programs of the role that holds the pages."""
    load: Callable[[], Sequence[jax.Array]]
    """Returns all arrays, flat."""
    store: Callable[[Sequence[jax.Array]], None]
    """Takes the arrays back after a program that they were donated to."""


class GroupPut:
    """Puts each DP group's row of an array on the group's devices."""

    def __init__(self, programs: TokenPrograms):
        self._sharding = cached_sharding(programs.mesh, ROWS)
        self._groups, self._slots = programs.groups, programs.slots
        deployment = programs.deployment
        pages = deployment.scheduler.page_buckets[-1]
        self._lanes = [
            LaneState(self._groups, self._slots, pages, deployment.modules, programs.tables)
            for _ in range(deployment.lanes)
        ]
        own = self._sharding.addressable_devices_indices_map((self._groups,))
        self._own = [own[device] for device in programs.mesh.local_devices]  # each device's rows
        make_put = fast_put()
        self._put = functools.cache(lambda *kind: make_put(*kind, self._sharding))
        self._tables: dict[int, tuple[np.ndarray, jax.Array]] = {}
        """The last page table of each lane, on the host and on the devices."""

    def __call__(self, plan: StepPlan) -> tuple[jax.Array, jax.Array]:
        """Returns batch array and page table of a lane's next plan. Takes plans once, in order.
        Most steps of a lane bring no page: they have the table of the step before."""
        batch, table = self._lanes[plan.lane].step(plan)
        if (kept := self._tables.get(plan.lane)) is None or kept[0] is not table:
            kept = self._tables[plan.lane] = table, self.rows(table)
        return self.rows(batch), kept[1]

    def rows(self, array: np.ndarray) -> jax.Array:
        """Puts an array with one row for each DP group on the mesh."""
        return self._put(array.shape, array.dtype)([array[rows] for rows in self._own])
