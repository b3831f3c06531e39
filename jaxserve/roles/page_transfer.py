"""Reads and writes a worker's KV pages for hand-offs, with compiled programs.

Used by the workers that hold pages (`colocated.py`, `attention.py`), on the engine's thread. A call
enqueues one program on the attention mesh, between those of steps, and returns at once. Arrays
passed in must have arrived: an array whose computation failed would destroy the pages that are
donated to the same program.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxserve.config.formats import FormatName
from jaxserve.errors import ConfigError
from jaxserve.link.dispatch.shards import fast_shards
from jaxserve.mesh import cached_sharding, sharded_zeros
from jaxserve.roles.compilation import PIECES, ROWS, Program, compile_all
from jaxserve.roles.layout import PageRun
from jaxserve.roles.page_programs import PageForms, PageKey, PagePrograms
from jaxserve.roles.token_programs import KVArrays, TokenPrograms

Pages = Sequence[jax.Array]


class PageTransfer:
    """Reads and writes pages in the wire form.

    Args:
      programs: programs of the role that holds the pages.
      pieces: forms in which they cross.

    Raises:
      ConfigError: a piece is no multiple of the page size, and pages are imported.
    """

    def __init__(self, programs: TokenPrograms, pieces: PageForms):
        self.programs = PagePrograms(programs, pieces)
        self.pieces, self.imports = tuple(pieces.sizes), tuple(pieces.imports)
        self.closes = self.programs.closes
        size = self.programs.page_size
        for piece in self.pieces if self.imports else ():
            if piece % size:
                raise ConfigError(f"cache.page_size = {size} does not divide pieces of {piece}")
        wanted: dict[PageKey, Program] = {}
        own = self.programs.format
        for piece in self.pieces:
            if pieces.exports:
                wanted[PageKey("gather", piece, own)] = self.programs.gather(piece)
            for cache_format in self.imports:
                key = PageKey("scatter", piece, cache_format)
                wanted[key] = self.programs.scatter(piece, cache_format)
        self._compiled: Mapping[PageKey, jax.stages.Compiled] = compile_all(wanted)
        mesh = self.programs.mesh
        self._devices = mesh.devices
        self._rows = cached_sharding(mesh, ROWS)
        self._pieces = cached_sharding(mesh, PIECES)
        self.landing = functools.cache(self._landing)
        self._zeros = functools.cache(self._empty)

    def warm_up(self, pages: Pages) -> Pages:
        """Runs every program once, without writing to any page of the pool."""
        nothing = PageRun(0, [])
        for key in self._compiled:
            if key.name == "gather":
                self.gather(pages, nothing, key.tokens)
            else:
                landing = self.landing(0, key.tokens, key.cache_format)
                arrived = [
                    jnp.zeros(shape.shape, shape.dtype, device=shape.sharding) for shape in landing
                ]
                pages = self.scatter(pages, nothing, key.tokens, key.cache_format, arrived)
        jax.block_until_ready(pages)
        return pages

    def gather(self, pages: Pages, run: PageRun, tokens: int) -> list[jax.Array]:
        """Starts to read a run of at most `tokens` tokens (a piece). Entries behind the run are
        arbitrary.

        Returns:
          the wire arrays of each KV head in turn, each on one device.
        """
        programs = self.programs
        shards_of, _ = fast_shards()
        first = run.group * programs.tp
        results = map(shards_of, self._gathered(pages, run, tokens))
        own = programs.parts(tokens, programs.format, own=True)
        shards = dict(zip(own, results, strict=True))
        found = []
        for pool, kind, head in programs.parts(tokens, programs.format):
            rank, index = programs.place(pool, head)
            found.append(shards[pool, kind, index][first + rank])
        return found

    def rows(self, *arrays: np.ndarray) -> Sequence[jax.Array | np.ndarray]:
        """Puts arrays with one row for each DP group on the groups' devices. In a runtime of one
        process it returns them unchanged: the programs' own transfer is cheaper."""
        if jax.process_count() == 1:
            return arrays
        return [
            jax.make_array_from_callback(array.shape, self._rows, array.__getitem__)
            for array in arrays
        ]

    def _gathered(self, pages: Pages, run: PageRun, tokens: int) -> Sequence[jax.Array]:
        """Calls the program and returns its output arrays."""
        programs = self.programs
        tables = programs.tables
        page_ids = np.zeros((programs.groups, programs.gather_pages(tokens) * tables), np.int32)
        # Behind the run its last page is read again, never a page of another sequence.
        page_ids[run.group].reshape(-1, tables)[:] = run.page_ids[-tables:] or 0
        page_ids[run.group, : len(run.page_ids)] = run.page_ids
        offset = np.full(programs.groups, 0, np.int32)
        offset[run.group] = run.offset
        key = PageKey("gather", tokens, programs.format)
        return self._compiled[key](*self.rows(page_ids, offset), *pages)

    def _landing(
        self, group: int, tokens: int, cache_format: FormatName
    ) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes and shardings in which a piece must arrive for `scatter`: every KV
        head once, on a device that holds it."""
        return [
            array.update(sharding=SingleDeviceSharding(self._lands_on(group, pool, head)))
            for (pool, _, head), array in self.programs.parts(tokens, cache_format).items()
        ]

    def _lands_on(self, group: int, pool: int, head: int) -> jax.Device:
        """Returns the device on which the arrays of a KV head arrive."""
        device: jax.Device = self._devices[group, self.programs.place(pool, head)[0]]
        return device

    def scatter(
        self,
        pages: Pages,
        run: PageRun,
        tokens: int,
        cache_format: FormatName,
        arrived: Sequence[jax.Array],
    ) -> Pages:
        """Starts to write a piece into whole pages; donates the pages and returns them.

        Args:
          run: pages to write, possibly fewer than the piece fills; the offset is 0.
          arrived: arrays in the form of `landing`, complete and without error.
        """
        programs = self.programs
        parts = dict(zip(programs.parts(tokens, cache_format), arrived, strict=True))
        arguments = []
        for pool, kind, index in programs.parts(tokens, cache_format, own=True):
            heads = [programs.head(pool, rank, index) for rank in range(programs.tp)]
            shards = [parts[pool, kind, head] for head in heads]
            arguments.append(self._assembled(run.group, shards))
        return self._scattered(pages, run, PageKey("scatter", tokens, cache_format), arguments)

    def _scattered(
        self, pages: Pages, run: PageRun, key: PageKey, arguments: Sequence[jax.Array]
    ) -> Pages:
        """Calls the compiled program."""
        programs = self.programs
        count = key.tokens // programs.page_size * programs.tables
        page_ids = np.full((programs.groups, count), programs.no_page, np.int32)
        page_ids[run.group, : len(run.page_ids)] = run.page_ids
        return self._compiled[key](*self.rows(page_ids), *arguments, *pages)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Sequence[jax.Array]:
        """Returns a shard of zeros of this shape for each of this process's devices."""
        whole = (self._devices.size * shape[0], *shape[1:])
        take_apart, _ = fast_shards()
        return take_apart(sharded_zeros(whole, dtype, self._pieces))

    def _assembled(self, group: int, shards: Sequence[jax.Array]) -> jax.Array:
        """Builds one argument of `scatter`: the group's shards, arbitrary ones for others."""
        shape, dtype = shards[0].shape, shards[0].dtype
        devices = self._devices
        whole = (devices.size * shape[0], *shape[1:])
        _, make_assemble = fast_shards()
        parts = list(self._zeros(shape, dtype) if len(devices) > 1 else shards)
        for rank, shard in enumerate(shards):
            device = devices[group, rank]
            if shard.devices() != {device}:  # several devices hold this head
                shard = jax.device_put(shard, device)
            parts[group * devices.shape[1] + rank] = shard
        return make_assemble(whole, dtype, self._pieces)(parts)


class PageAccess:
    """Reads and writes a worker's pages between its steps. Only for the thread that enqueues the
    steps.

    Args:
      transfer: compiled programs.
      arrays: the worker's pages.
    """

    def __init__(self, transfer: PageTransfer, arrays: KVArrays):
        self.transfer = transfer
        self._load, self._store = arrays.load, arrays.store
        self._store(transfer.warm_up(self._load()))

    def read(self, run: PageRun, tokens: int, piece: int) -> list[jax.Array]:
        """Starts to read the entries of `tokens` tokens, as a piece of `piece` tokens; see
        `PageTransfer.gather`.

        Raises:
          ValueError: The run's pages end before the last token.
        """
        programs = self.transfer.programs
        covered = len(run.page_ids) // programs.tables * programs.page_size - run.offset
        if not 0 < tokens <= min(covered, piece):
            raise ValueError(f"{tokens} tokens wanted, {covered} are in the pages, piece {piece}")
        return self._read(run, piece)

    def _read(self, run: PageRun, piece: int) -> list[jax.Array]:
        return self.transfer.gather(self._load(), run, piece)

    def write(
        self, run: PageRun, tokens: int, cache_format: FormatName, arrived: Sequence[jax.Array]
    ) -> None:
        """Starts to write a piece that has arrived; see `PageTransfer.scatter`."""
        self._store(self.transfer.scatter(self._load(), run, tokens, cache_format, arrived))


OpenPages = Callable[[KVArrays, int, PageForms], PageAccess]
"""Makes a worker's pages readable and writable; the access gets this number in the worker."""


def page_access(arrays: KVArrays, number: int, pieces: PageForms) -> PageAccess:
    """Makes the pages of a worker with one process readable and writable. Compiles the programs and
    warms them up. `number` has no use here; `page_spread.page_access` is the form for several
    processes."""
    return PageAccess(PageTransfer(arrays.programs, pieces), arrays)
