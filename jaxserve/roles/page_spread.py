"""Reads and writes pages of a mesh over several processes, for hand-offs and for host memory.

A pages link has one end a worker, and its host memory is that of one process: the leading one. The
mesh's own collectives bring pieces together there, and spread pieces from there. Every process
therefore takes part in every piece, at the same place between the same steps (`worker.py`). The
link's other end does not know this. Entries in the format of another worker's cache are converted
on arrival.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.config.formats import FormatName
from jaxserve.link.dispatch.shards import fast_shards
from jaxserve.model.attention.kv_cache import Entry
from jaxserve.model.message import has_scales, storage
from jaxserve.roles.compilation import PIECES, REPLICATED, Arrays, Program, compile_all
from jaxserve.roles.layout import PageRun
from jaxserve.roles.page_programs import PageForms, PageKey
from jaxserve.roles.page_transfer import PageAccess, Pages, PageTransfer
from jaxserve.roles.token_programs import KVArrays, TokenPrograms
from jaxserve.roles.worker import PageOrder, ReadPages, WritePages
from pallas_kernels.quantize import as_bits, from_bits
from pallas_kernels.quantize.api import quantize_rows


def in_own_format(
    entries: Sequence[Entry], stacks: list[Array], theirs: FormatName, own: FormatName
) -> list[Array]:
    """Returns arrays `[heads, layers, rows, …]`, values and then scales of 8-bit formats, in the
    cache's own format."""
    values, scales = [], []
    arrived = iter(stacks[len(entries) :])
    for entry, row in zip(entries, stacks, strict=False):
        if entry.plain:
            values.append(row)
            continue
        if has_scales(theirs):
            row = from_bits(row).astype(jnp.float32) * next(arrived)[..., None]
        if not has_scales(own):
            values.append(row.astype(storage(own)))
            continue
        quantised, scale = quantize_rows(row.reshape(-1, row.shape[-1]), own)
        values.append(as_bits(quantised).reshape(row.shape))
        scales.append(scale.reshape(row.shape[:-1]))
    return [*values, *scales]


AXES = ("dp", "tp")
Tell = Callable[[PageOrder], None]


class LedPages(PageAccess):
    """Pages of a worker that may have several processes. In the leading process every read and
    write is told to the others, before it is enqueued here.

    Args:
      transfer, arrays: see `PageAccess`.
      number: of this access among those of the worker; the same in all processes.
      tell: sends the followers an order.
    """

    def __init__(self, transfer: PageTransfer, arrays: KVArrays, number: int, tell: Tell):
        self.number, self._tell = number, tell
        super().__init__(transfer, arrays)

    def _read(self, run: PageRun, piece: int) -> list[jax.Array]:
        self._tell(ReadPages(self.number, run.group, [*run.page_ids], run.offset, piece))
        return super()._read(run, piece)

    def write(self, run: PageRun, tokens: int, cache_format: FormatName, arrived: Pages) -> None:
        """See `PageAccess.write`."""
        ids = [*run.page_ids]
        self._tell(WritePages(self.number, run.group, ids, run.offset, tokens, cache_format))
        super().write(run, tokens, cache_format, arrived)

    def follow(self, order: PageOrder) -> None:
        """Takes part in a read or write of the leading process."""
        run = PageRun(order.group, order.page_ids, order.offset)
        if isinstance(order, ReadPages):
            super()._read(run, order.tokens)
        else:
            super().write(run, order.tokens, order.cache_format, ())


def no_one(order: PageOrder) -> None:
    """Stands for `tell` where this process follows, or has the mesh alone."""


def page_access(
    arrays: KVArrays, number: int, pieces: PageForms, *, tell: Tell = no_one
) -> LedPages:
    """Makes a worker's pages readable and writable. Compiles the programs and warms them up.

    Args:
      number, tell: see `LedPages`.
    """
    programs, pieces = arrays.programs, pieces._replace(convert=in_own_format)
    processes = {device.process_index for device in programs.mesh.devices.flat}
    if len(processes) == 1:
        return LedPages(PageTransfer(programs, pieces), arrays, number, no_one)
    return LedPages(SpreadPages(programs, pieces), arrays, number, tell)


class SpreadPages(PageTransfer):
    """`PageTransfer` of a mesh over several processes. Each process makes all calls, in the same
    order; only the leader passes arrays that have arrived."""

    def __init__(self, programs: TokenPrograms, pieces: PageForms):
        super().__init__(programs, pieces)
        mesh = self.programs.mesh
        here = jax.process_index()
        self._device = next(d for d in mesh.devices.flat if d.process_index == here)
        wanted: dict[PageKey, Program] = {}
        for key in self._compiled:
            name = self._collected if key.name == "gather" else self._spread
            wanted[key] = name(key.tokens, key.cache_format)
        self._between = compile_all(wanted)

    def gather(self, pages: Pages, run: PageRun, tokens: int) -> list[jax.Array]:
        """Like `PageTransfer.gather`; returns this process's copies."""
        key = PageKey("gather", tokens, self.programs.format)
        meant = np.arange(self.programs.groups, dtype=np.int32) == run.group
        results = self._gathered(pages, run, tokens)
        found = self._between[key](*self.rows(meant.astype(np.int32)), *results)
        shards_of, _ = fast_shards()
        return [shards_of(array)[0] for array in found]

    def _lands_on(self, group: int, pool: int, head: int) -> jax.Device:
        """Every KV head arrives on this process's first device."""
        return self._device

    def scatter(
        self,
        pages: Pages,
        run: PageRun,
        tokens: int,
        cache_format: FormatName,
        arrived: Sequence[jax.Array],
    ) -> Pages:
        """Like `PageTransfer.scatter`; `arrived` is empty in every process but the leader's."""
        key = PageKey("scatter", tokens, cache_format)
        wire = self.programs.parts(tokens, cache_format).values()
        given: Sequence[jax.Array | None] = arrived or [None] * len(wire)
        sources = [self._source(*pair) for pair in zip(wire, given, strict=True)]
        return self._scattered(pages, run, key, self._between[key](*sources))

    def _source(self, wire: jax.ShapeDtypeStruct, arrived: jax.Array | None) -> jax.Array:
        """Returns an array over all devices: the arrived one on this process's first device, zeros
        on all others."""
        devices = self.programs.mesh.devices.size
        whole = (devices * wire.shape[0], *wire.shape[1:])
        _, make_assemble = fast_shards()
        zeros = self._zeros(wire.shape, wire.dtype)
        parts = list(zeros) if arrived is None else [arrived, *zeros[1:]]
        return make_assemble(whole, wire.dtype, self._pieces)(parts)

    def _collected(self, tokens: int, cache_format: FormatName) -> Program:
        """(DP group that was read, results of `gather`…) → wire arrays of every KV head."""
        programs = self.programs
        own, parts = (programs.parts(tokens, cache_format, own=own) for own in (True, False))

        def body(meant: Int[Array, "1"], results: Arrays) -> Arrays:
            rank, found = jax.lax.axis_index("tp"), []
            held = dict(zip(own, results, strict=True))
            for pool, kind, head in parts:
                owner, index = programs.place(pool, head)
                array = held[pool, kind, index]
                there = (meant[0] > 0) & (rank == owner)
                found.append(jnp.where(there, array, jnp.zeros_like(array)))
            return tuple(_added_up(found))

        return Program(
            "collect_pages",
            body,
            programs.mesh,
            (programs.shape(programs.groups), programs.everywhere(own.values())),
            (REPLICATED,) * len(parts),
        )

    def _spread(self, tokens: int, cache_format: FormatName) -> Program:
        """(wire arrays of every KV head, on one device, and zeros on the others…) → those of each
        device's own heads, as arguments of `scatter`."""
        programs = self.programs
        own, parts = (programs.parts(tokens, cache_format, own=own) for own in (True, False))

        def body(arrived: Arrays) -> Arrays:
            rank, found = jax.lax.axis_index("tp"), []
            whole = dict(zip(parts, _added_up(arrived), strict=True))
            for pool, kind, index in own:
                alike = [whole[part] for part in parts if part[:2] == (pool, kind)]
                heads = [programs.head(pool, each, index) for each in range(programs.tp)]
                found.append(jnp.stack(alike)[jnp.asarray(heads)[rank]])
            return tuple(found)

        return Program(
            "spread_pages",
            body,
            programs.mesh,
            (programs.everywhere(parts.values()),),
            (PIECES,) * len(own),
        )


def _added_up(parts: Sequence[Array]) -> list[Array]:
    """Returns each array as held by the one device on which it is not all zeros.

    All bytes go through one collective. With several collectives in a program, the processes of a
    CPU mesh might not start with the same one.
    """
    flat = [jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(-1) for part in parts]
    total = jax.lax.psum(jnp.concatenate(flat), AXES)
    found, start = [], 0
    for part, data in zip(parts, flat, strict=True):
        size = part.dtype.itemsize
        shape = (*part.shape, size) if size > 1 else part.shape
        own = total[start : start + data.size].reshape(shape)
        found.append(jax.lax.bitcast_convert_type(own, part.dtype))
        start += data.size
    return found
