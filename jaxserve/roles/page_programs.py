"""Programs that read and write pages of the KV cache for a hand-off, in its wire form.

The wire form of a run of tokens is one array for each KV head and page array, `[layers, rows,
width]` for values and `[layers, rows]` for the scales of 8-bit formats, with a row for a token or
for `Entry.every` tokens. It does not depend on `tp` or the page size of either end. `gather` makes
it from pages. `scatter` writes it into pages, and converts it if the two caches have different
formats. Both run on the whole attention mesh: one DP group takes part with its pages, the others
without any.

Of a state one row crosses, in the last piece of a hand-off: pieces of the smallest size have
states, others do not. With `rings_last` this holds for all pages of rings.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num

from jaxserve.config.formats import FormatName
from jaxserve.model.attention.kv_cache import Entry, PagePool, row_arrays
from jaxserve.roles.compilation import PIECES, Arrays, Program
from jaxserve.roles.token_programs import TokenPrograms
from pallas_kernels.quantize.words import Words


class PageKey(NamedTuple):
    """Names a program that reads or writes pages."""

    name: Literal["gather", "scatter"]
    tokens: int
    cache_format: FormatName
    """Format of the values on the wire."""


Convert = Callable[[Sequence[Entry], list[Array], FormatName, FormatName], list[Array]] | None
"""Converts arrays `[heads, layers, rows, …]` of a pool from one format to another."""
ArrayName = tuple[int, int, int]
"""Names one array of a piece: number of the pool, number of the page array among those of the pool,
and the KV head, or its place among those of a device."""


class PageForms(NamedTuple):
    """Forms in which a worker's pages are read and written.

    Attributes:
      sizes: tokens of a piece, ascending; programs are compiled for each.
      exports: whether pages are read.
      imports: wire formats in which pieces arrive; empty: none do.
      rings_last: whether only pieces of the smallest size, a page, have entries of layers with a
        window.
      convert: used where pieces arrive in another format than the cache's; None: none do.
    """

    sizes: Sequence[int]
    exports: bool
    imports: Sequence[FormatName] = ()
    rings_last: bool = False
    convert: Convert = None


class PagePrograms:
    """The programs of one attention mesh.

    Args:
      programs: of the role that holds the pages.
      pieces: forms in which they cross.
    """

    def __init__(self, programs: TokenPrograms, pieces: PageForms):
        config, deployment = programs.config, programs.deployment
        self.mesh = programs.mesh
        self.layers = config.all_layers
        self.groups, self.tp = deployment.attention.dp, deployment.attention.tp
        self.page_size, self._smallest = deployment.cache.page_size, pieces.sizes[0]
        self.pools, self.tables = programs.pools, programs.tables
        self.no_page = max(self.pools[0].pages)
        """Page id that no pool has."""
        self.format: FormatName = deployment.cache_format
        self._stacked, self._convert = programs.stacked, pieces.convert
        self.shape, self._shared = programs.shape, programs.shared
        self._all_pages = programs.all_pages
        self.entries = [entry for pool in self.pools for entry in pool.entries]
        self.heads = [pool.entries[0].heads for pool in self.pools]
        """KV heads of each pool."""
        self._listed: dict[tuple[int, FormatName, bool], dict[ArrayName, jax.ShapeDtypeStruct]] = {}
        states = not all(entry.every for entry in self.entries)
        self.closes = states or (pieces.rings_last and self.tables > 1)
        """True if only pieces of the smallest size have entries of rings: then the last piece of a
        hand-off must have that size."""

    def head(self, pool: int, rank: int, index: int) -> int:
        """Returns the number of the `index`-th KV head of the device with this rank along tp."""
        heads = self.heads[pool]
        return rank * (heads // self.tp) + index if heads >= self.tp else rank * heads // self.tp

    def place(self, pool: int, head: int) -> tuple[int, int]:
        """Returns the tp rank of the first device with a KV head, and the head's index there."""
        heads = self.heads[pool]
        return divmod(head, heads // self.tp) if heads >= self.tp else (head * self.tp // heads, 0)

    def parts(
        self, tokens: int, cache_format: FormatName, *, own: bool = False
    ) -> dict[ArrayName, jax.ShapeDtypeStruct]:
        """Lists the arrays of a piece, head after head: those of all heads, or those of a device's
        own heads. Every piece asks several times, on the engine's thread, so lists are kept."""
        if (tokens, cache_format, own) in self._listed:
            return self._listed[tokens, cache_format, own]
        heads = [max(1, count // self.tp) if own else count for count in self.heads]
        listed = self._listed[tokens, cache_format, own] = {
            (number, kind, head): array
            for head in range(max(heads))
            for number, pool in enumerate(self.pools)
            if head < heads[number]
            for kind, array in enumerate(
                row_arrays(pool.entries, (len(pool.layers), tokens), cache_format)
            )
            if tokens == self._smallest or not self._last(number, kind)
        }
        return listed

    def _last(self, pool: int, kind: int) -> bool:
        """Returns whether only pieces of the smallest size have the rows of a page array."""
        return self.closes and self.pools[pool].tables[kind] > 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's entries on the wire, all heads together, without those that only
        pieces of the smallest size have."""
        parts = self.parts(self.page_size, self.format).items()  # of a page: rows are whole there
        paged = [array for (pool, kind, _), array in parts if not self._last(pool, kind)]
        return sum(array.size * array.dtype.itemsize for array in paged) // self.page_size

    def everywhere(self, wire: Iterable[jax.ShapeDtypeStruct]) -> tuple[jax.ShapeDtypeStruct, ...]:
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

        def body(page_ids: Array, offset: Array, held: Arrays) -> Arrays:
            found, pages = [], self._opened(held)
            for number, kind, head in parts:
                own = [pages[at] for at in places[number][kind]]
                rows, _ = self._rows(self.pools[number], kind, page_ids)
                found.append(self._gathered(own, head, rows, offset[0], tokens))
            return tuple(found)

        parts, places = self.parts(tokens, self.format, own=True), self._places()

        return Program(
            "gather_pages",
            body,
            self.mesh,
            (
                self.shape(self.groups, self.gather_pages(tokens) * self.tables),
                self.shape(self.groups),
                self._all_pages,
            ),
            (PIECES,) * len(parts),
        )

    def scatter(self, tokens: int, cache_format: FormatName) -> Program:
        """(page ids, wire arrays of every KV head of the device, pages) → pages.

        `page_ids` is `[dp, tokens / page_size * tables]`; ids that are not below `pages` are not
        written. The others of a table follow each other.
        """
        parts = self.parts(tokens, cache_format, own=True)

        def body(page_ids: Array, arrived: Arrays, held: Arrays) -> Arrays:
            pages = self._opened(held)
            for number, (pool, arrays) in enumerate(zip(self.pools, self._places(), strict=True)):
                converted = self._converted(number, parts, arrived, cache_format)
                for kind, heads in converted.items():
                    own, there = self._rows(pool, kind, page_ids)
                    for head, rows in enumerate(heads):
                        split = jnp.split(rows, len(arrays[kind]))
                        for at, part in zip(arrays[kind], split, strict=True):
                            pages[at] = self._put(pages[at], own, there, head, part)
            return tuple(pages) if self._shared is None else self._shared.in_pools(pages)

        return Program(
            "scatter_pages",
            body,
            self.mesh,
            (
                self.shape(self.groups, tokens // self.page_size * self.tables),
                self.everywhere(parts.values()),
                self._all_pages,
            ),
            tuple(array.sharding.spec for array in self._all_pages),
            donates=(2,),
        )

    def _opened(self, held: Arrays) -> list[Any]:
        """Returns the page arrays; those that lie in pools as views."""
        return [*held] if self._shared is None else self._shared.in_arrays(held)

    def _places(self) -> list[list[list[int]]]:
        """Returns the places of each pool's page arrays, kind of rows by kind; an array has the
        pages of one layer, or of all."""
        sizes = {n: len(pool.arrays) for pool in self.pools for n in pool.layers}
        if self._stacked:
            sizes = {number: len(pool.arrays) for number, pool in enumerate(self.pools)}
        found = []
        for number, pool in enumerate(self.pools):
            owners = [number] if self._stacked else pool.layers
            firsts = [sum(sizes[before] for before in range(owner)) for owner in owners]
            found.append([[first + kind for first in firsts] for kind in range(len(pool.arrays))])
        return found

    def _rows(
        self, pool: PagePool, kind: int, page_ids: Int[Array, "1 ids"]
    ) -> tuple[Int[Array, "layers pages"], Bool[Array, " pages"]]:
        """Returns the rows of a pool's page array that hold these pages, of each layer if it has
        all layers, and which of the pages exist. States have one page."""
        table = pool.tables[kind]
        own = page_ids[0].reshape(-1, self.tables)[:, table]
        there = own < pool.pages[table]
        if not pool.entries[0].every:
            only = jnp.argmax(there)[None]
            own, there = own[only], there[only]
        layers = len(pool.layers) if self._stacked else 1
        first = jnp.arange(layers, dtype=page_ids.dtype)[:, None] * pool.pages[table]
        return first + own, there

    def _gathered(
        self,
        arrays: Sequence[Any],
        head: int,
        places: Int[Array, "layers count"],
        offset: Int[Array, ""],
        tokens: int,
    ) -> Num[Array, "all_layers rows *width"]:
        every, layers = self.page_size // arrays[0].shape[2], len(arrays) * len(places)

        def read(places: Array) -> Array:
            found = [array[places.reshape(-1), head] for array in arrays]
            pages = jnp.concatenate(found) if len(found) > 1 else found[0]
            return pages.reshape(layers, -1, *pages.shape[2:])

        def shifted() -> Array:
            rows = tokens // every
            return jax.lax.dynamic_slice_in_dim(read(places), offset // every, rows, axis=1)

        count, rest = divmod(tokens, self.page_size)
        if places.shape[1] == 1:  # a state; tokens have at least two (`gather_pages`)
            return read(places)
        if rest:
            return shifted()
        # Two ends of one page size: every byte is copied once.
        return jax.lax.cond(offset == 0, lambda: read(places[:, :count]), shifted)

    def _put(
        self,
        array: Any,
        places: Int[Array, "layers count"],
        there: Bool[Array, " count"],
        head: int,
        entries: Num[Array, "layers rows *width"],
    ) -> Any:
        """Writes a head's entries into the pages of a page array that are there."""
        (layers, count), rows = places.shape, places.reshape(-1)
        blocks = entries.reshape(rows.shape[0], array.shape[2], *entries.shape[2:])
        if isinstance(array, Words):
            rows = jnp.where(jnp.tile(there, layers), rows, array.words.shape[0])
            return array.holding(blocks, (rows, head))
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
        self,
        pool: int,
        parts: Iterable[ArrayName],
        arrived: Sequence[Array],
        cache_format: FormatName,
    ) -> dict[int, list[Array]]:
        """Returns a pool's wire arrays in the cache's format, by kind of page array, then by head;
        each is `[layers, tokens, …]`."""
        kinds: dict[int, list[Array]] = {}
        for (number, kind, _), array in zip(parts, arrived, strict=True):
            if number == pool:
                kinds.setdefault(kind, []).append(array)
        if cache_format == self.format or not kinds:
            return kinds
        stacks = [jnp.stack(heads) for heads in kinds.values()]
        assert self._convert is not None
        entries = self.pools[pool].entries
        converted = self._convert(entries, stacks, cache_format, self.format)
        return {kind: [*stack] for kind, stack in enumerate(converted)}
