"""Programs that read and write pages of the KV cache for a hand-off, in its wire form.

The wire form of a run of tokens is one array for each KV head and page array, `[layers, tokens,
width]` for values and `[layers, tokens]` for the scales of 8-bit formats. It does not depend on
`tp` or the page size of either end. `gather` makes it from pages. `scatter` writes it into pages,
and converts it if the two caches have different formats. Both run on the whole attention mesh: one
DP group takes part with its pages, the others without any.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from jaxserve.config.formats import FormatName
from jaxserve.model.attention.kv_cache import PAGES_SPEC, PagePool, layer_entries, row_arrays
from jaxserve.model.quant.rows import has_scales, storage
from jaxserve.roles.program import PIECES, Arrays, Program
from jaxserve.roles.token_programs import TokenPrograms
from pallas_kernels.quantize import as_bits, from_bits
from pallas_kernels.quantize.api import quantize_rows


class PageKey(NamedTuple):
    """Names a program that reads or writes pages."""

    name: Literal["gather", "scatter"]
    tokens: int
    cache_format: FormatName
    """Format of the values on the wire."""


class PagePrograms:
    """The programs of one attention mesh.

    Args:
      programs: of the role that holds the pages.
      stacked: whether the pages of all layers are one array (`colocated_programs.py`) or one each.
    """

    def __init__(self, programs: TokenPrograms, *, stacked: bool):
        config, deployment = programs.config, programs.deployment
        self.mesh = programs.mesh
        self.layers = config.all_layers
        self.groups, self.tp = deployment.attention.dp, deployment.attention.tp
        self.pages, self.page_size = deployment.cache.pages, deployment.cache.page_size
        self.pools, self.tables = programs.pools, programs.tables
        self.format: FormatName = deployment.cache_format
        self._stacked, self._kinds = stacked, len(programs.pages_specs) * len(programs.pools)
        self.shape, self._all_pages = programs.shape, programs.all_pages
        self.entries = layer_entries(config, deployment)
        self.kv_heads = self.entries[0].heads
        self._scaled = [entry for entry in self.entries if not entry.plain]

    @property
    def heads(self) -> int:
        """Number of KV heads that a device holds."""
        return max(1, self.kv_heads // self.tp)

    def head(self, rank: int, index: int) -> int:
        """Returns the number of the `index`-th KV head of the device with this rank along tp."""
        if self.kv_heads >= self.tp:
            return rank * self.heads + index
        return rank * self.kv_heads // self.tp

    def wire(self, tokens: int, cache_format: FormatName) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the arrays of one KV head, pool after pool."""
        return tuple(
            array
            for pool in self.pools
            for array in row_arrays(self.entries, (len(pool.layers), tokens), cache_format)
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's entries on the wire, all heads together."""
        arrays = self.wire(1, self.format)
        return self.kv_heads * sum(array.size * array.dtype.itemsize for array in arrays)

    def page_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the pages of all layers, as programs take them."""
        if self._stacked:
            return self._all_pages
        owners = sorted((layer, pool.arrays) for pool in self.pools for layer in pool.layers)
        return tuple(array for _, arrays in owners for array in arrays)

    def everywhere(self, wire: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of arrays with one part for each device along the first axis."""
        devices = self.groups * self.tp
        return tuple(
            self.shape(devices * one.shape[0], *one.shape[1:], dtype=one.dtype, spec=PIECES)
            for one in wire
        )

    def gather_pages(self, tokens: int) -> int:
        """Number of pages that can hold any `tokens` consecutive tokens."""
        return -(-tokens // self.page_size) + 1

    def gather(self, tokens: int) -> Program:
        """(page ids, offset, pages) → the wire arrays of every KV head of the device.

        `page_ids` is `[dp, gather_pages * tables]`; `offset` `[dp]` is the place of the first token
        in these pages. The results have one part for each device along the first axis.
        """

        def body(page_ids: Array, offset: Array, pages: Arrays) -> Arrays:
            return tuple(
                self._gathered(pool, [pages[at] for at in places], head, own, offset[0], tokens)
                for head in range(self.heads)
                for pool, arrays in self._places()
                for own in [self._of_pool(pool, page_ids)]
                for places in arrays
            )

        return Program(
            "gather_pages",
            body,
            self.mesh,
            (
                self.shape(self.groups, self.gather_pages(tokens) * self.tables),
                self.shape(self.groups),
                self.page_shapes(),
            ),
            (PIECES,) * (self.heads * self._kinds),
        )

    def scatter(self, tokens: int, cache_format: FormatName) -> Program:
        """(page ids, wire arrays of every KV head of the device, pages) → pages.

        `page_ids` is `[dp, tokens / page_size * tables]`; ids that are not below `pages` are not
        written. The others of a table follow each other.
        """
        shapes = self.page_shapes()
        wire = self.wire(tokens, cache_format) * self.heads

        def body(page_ids: Array, arrived: Arrays, held: Arrays) -> Arrays:
            pages = list(held)
            converted = self._converted(arrived, cache_format)
            for pool, arrays in self._places():
                own = self._of_pool(pool, page_ids)
                for places in arrays:
                    for head, rows in enumerate(next(converted)):
                        parts = jnp.split(rows, len(places))
                        for at, part in zip(places, parts, strict=True):
                            pages[at] = self._put(pool, pages[at], own, head, part)
            return tuple(pages)

        return Program(
            "scatter_pages",
            body,
            self.mesh,
            (
                self.shape(self.groups, tokens // self.page_size * self.tables),
                self.everywhere(wire),
                shapes,
            ),
            (PAGES_SPEC,) * len(shapes),
            donates=(2,),
        )

    def _places(self) -> Iterator[tuple[PagePool, list[list[int]]]]:
        """Yields every pool with the places of its page arrays, kind of rows by kind; an array has
        the pages of one layer, or of all."""
        for number, pool in enumerate(self.pools):
            owners = [number] if self._stacked else pool.layers
            kinds = len(pool.arrays)
            yield pool, [[owner * kinds + kind for owner in owners] for kind in range(kinds)]

    def _of_pool(self, pool: PagePool, page_ids: Int[Array, "1 ids"]) -> Int[Array, " pages"]:
        """The page ids in a pool, of those in all page tables."""
        return page_ids[0].reshape(-1, self.tables)[:, int(pool.ring)]

    def _gathered(
        self,
        pool: PagePool,
        arrays: Sequence[Num[Array, "rows heads page_size *width"]],
        head: int,
        page_ids: Int[Array, " count"],
        offset: Int[Array, ""],
        tokens: int,
    ) -> Num[Array, "layers tokens *width"]:
        def read(page_ids: Array) -> Array:
            found = [array[self._rows(pool, page_ids), head] for array in arrays]
            pages = jnp.concatenate(found) if len(found) > 1 else found[0]
            return pages.reshape(len(pool.layers), -1, *pages.shape[2:])

        def shifted() -> Array:
            return jax.lax.dynamic_slice_in_dim(read(page_ids), offset, tokens, axis=1)

        count, rest = divmod(tokens, self.page_size)
        if rest:
            return shifted()
        # Two ends of one page size: every byte is copied once.
        return jax.lax.cond(offset == 0, lambda: read(page_ids[:count]), shifted)

    def _rows(self, pool: PagePool, page_ids: Int[Array, " count"]) -> Int[Array, " rows"]:
        """Rows of a page array that hold these pages; layer by layer if it has all layers."""
        if not self._stacked:
            return page_ids
        first = jnp.arange(len(pool.layers), dtype=page_ids.dtype)[:, None] * pool.pages
        return (first + page_ids).reshape(-1)

    def _put(
        self,
        pool: PagePool,
        array: Num[Array, "rows heads page_size *width"],
        page_ids: Int[Array, " count"],
        head: int,
        entries: Num[Array, "layers tokens *width"],
    ) -> Num[Array, "rows heads page_size *width"]:
        """Writes a head's entries into these pages of a page array."""
        rows, count = self._rows(pool, page_ids), page_ids.shape[0]
        there = page_ids < pool.pages
        blocks = entries.reshape(rows.shape[0], self.page_size, *entries.shape[2:])
        layers = rows.shape[0] // count
        if self.mesh.devices.flat[0].platform != "cpu":
            rows = jnp.where(jnp.tile(there, layers), rows, array.shape[0])
            return array.at[rows, head].set(blocks, mode="drop")
        # XLA's scatter takes three times as long on CPUs as copying block after block in place.
        first, valid = jnp.argmax(there), jnp.sum(there)

        def write(number: Array, array: Array) -> Array:
            at = number // valid * count + first + number % valid
            block = jax.lax.dynamic_slice_in_dim(blocks, at, 1)[:, None]
            start: list[Any] = [rows[at], head, *[0] * (array.ndim - 2)]
            return jax.lax.dynamic_update_slice(array, block, start)

        return jax.lax.fori_loop(0, layers * valid, write, array)

    def _converted(
        self, arrived: Sequence[Array], cache_format: FormatName
    ) -> Iterator[Sequence[Array]]:
        """Converts wire arrays to the cache's format: pool by pool and kind of page array by kind,
        then by head; each is `[layers, tokens, …]`."""
        arrays = len(arrived) // self.heads
        by_kind = [arrived[place::arrays] for place in range(arrays)]
        if cache_format == self.format:
            yield from by_kind
            return
        kinds = arrays // len(self.pools)
        for first in range(0, arrays, kinds):
            stacks = [jnp.stack(heads) for heads in by_kind[first : first + kinds]]
            yield from ([*stack] for stack in self._in_own_format(stacks, cache_format))

    def _in_own_format(self, stacks: list[Array], cache_format: FormatName) -> list[Array]:
        """Converts arrays `[heads, layers, tokens, …]` from the wire's format to the cache's."""
        scaled, ends = len(self._scaled), len(self.entries)
        rows, wide = stacks[:scaled], stacks[scaled:ends]
        if has_scales(cache_format):
            rows = [
                from_bits(row).astype(jnp.float32) * scale[..., None]
                for row, scale in zip(rows, stacks[ends:], strict=True)
            ]
        own = self.format
        if not has_scales(own):
            return [row.astype(storage(own)) for row in rows]
        values, scales = [], []
        for row in rows:
            quantised, scale = quantize_rows(row.reshape(-1, row.shape[-1]), own)
            values.append(as_bits(quantised).reshape(row.shape))
            scales.append(scale.reshape(row.shape[:-1]))
        return [*values, *wide, *scales]
