"""Hands out a worker's weights to other workers in the shapes of the checkpoint, independently of
this worker's meshes, stacks and slots.

Called by the threads of a weights server (`link/weights/server.py`) beside the steps. Only leaves
of experts change. They are read from the slot that holds the expert at that moment, by a program
enqueued while no expert moves (`ExpertSlots.changing`), so a later move cannot overwrite them.
"""

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxserve.checkpoint.arrays import QUANTISED_PARTS, block_of
from jaxserve.checkpoint.peer import scales_shape, weights_hello
from jaxserve.checkpoint.regions import leaf_shape
from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError
from jaxserve.link.weights.client import pieces
from jaxserve.link.weights.frames import Held, HeldArray, Ranges
from jaxserve.link.weights.server import WeightsServer
from jaxserve.roles.weights import HeldBlock
from pallas_kernels.input_major import in_rows

if TYPE_CHECKING:  # a colocated or attention worker may have none
    from jaxserve.roles.expert_slots import ExpertSlots

logger = logging.getLogger(__name__)


class _Array(NamedTuple):
    """One leaf of a block, as an array of the checkpoint."""

    block: HeldBlock
    place: int
    """Index of the leaf in the block."""
    held: HeldArray


class HeldWeights:
    """Weights that a worker can hand out. Any thread may read them.

    Args:
      blocks: blocks that the worker holds.
      slots: slots of the routed experts; None without routed experts.
    """

    def __init__(self, blocks: Sequence[HeldBlock], slots: "ExpertSlots | None"):
        self._slots = slots
        self._arrays = {
            (block.name, name): _Array(block, place, held)
            for block in blocks
            for place, (name, held) in enumerate(_held(block).items())
            if held is not None and _is_whole(block.leaves()[place])
        }

    def held(self) -> Held:
        """Arrays that this process holds whole."""
        held: Held = {}
        for (block, leaf), array in self._arrays.items():
            held.setdefault(block, {})[leaf] = array.held
        return held

    def warm_up(self) -> None:
        """Compiles the programs that cut experts' leaves, for requests of whole rows."""
        seen: set[tuple[tuple[int, ...], str]] = set()
        for (block, leaf), array in self._arrays.items():
            shape, dtype = array.held.shape, array.held.dtype
            if array.held.apart and (shape, dtype) not in seen:
                seen.add((shape, dtype))
                whole = (0, 1), *((0, size) for size in shape[1:])
                self.read(block, leaf, next(pieces(array.held, whole, np.dtype(dtype).itemsize)))

    def read(self, block: str, leaf: str, ranges: Ranges) -> np.ndarray:
        """Returns the bytes of a part of a leaf, row by row. Waits for them.

        Raises:
          ValueError: this process does not hold that part.
        """
        array = self._arrays.get((block, leaf))
        if array is None:
            raise ValueError(f"{block}: {leaf} is not here")
        shape = array.held.shape
        inside = len(ranges) == len(shape) and all(
            0 <= low < high <= size for (low, high), size in zip(ranges, shape, strict=True)
        )
        if not inside or (array.held.apart and ranges[0][1] - ranges[0][0] > 1):
            raise ValueError(f"{block}: {leaf} {shape} has no part {ranges}")
        own, known = array.block, array.block.template.leaves[array.place]
        wanted = ranges
        if known.input_major:  # reads the whole tiles that contain these rows
            *outer, (first, stop), columns = ranges
            width = known.shape[-1]
            ranges = (*outer, (first // width, -(-stop // width)), columns, (0, width))
        if not array.held.apart:
            where = ranges if own.entry is None else (_one(own.entry), *ranges)
            parts = _overlaps(own.leaves()[array.place], where, apart=False)
        else:
            assert self._slots is not None
            with self._slots.changing:
                slot = self._slots.placements[own.layer].index(ranges[0][0])
                where = (_one(slot), *ranges[1:])
                where = where if own.entry is None else (_one(own.entry), *where)
                parts = _overlaps(own.leaves()[array.place], where, apart=True)
        whole = _assembled(parts, where)
        if known.input_major:
            (first, stop), start = wanted[-2], ranges[-3][0] * known.shape[-1]
            whole = in_rows(whole)[..., first - start : stop - start, :]
        return np.ascontiguousarray(whole).reshape(-1).view(np.uint8)


def _held(block: HeldBlock) -> dict[str, HeldArray | None]:
    """Returns the block's leaves in order; None for a leaf that the checkpoint does not have."""
    template, sources = block.template, block.sources
    leaves = dict(zip(template.names, template.leaves, strict=True))
    held: dict[str, HeldArray | None] = {}
    for name, leaf in leaves.items():
        base, _, kind = name.rpartition(".")
        if name in sources:
            shape = leaf_shape(sources[name])
        elif base in sources and kind in QUANTISED_PARTS:
            shape = leaf_shape(sources[base])
            if kind != "values":
                shape = scales_shape(shape, block_of(leaves[f"{base}.values"].shape, leaf.shape))
        else:
            held[name] = None
            continue
        held[name] = HeldArray(shape, np.dtype(leaf.dtype).name, leaf.of_slots)
    return held


def _is_whole(array: jax.Array) -> bool:
    """Returns whether the devices of this process hold the whole array."""
    everywhere = array.sharding.devices_indices_map(array.shape).values()
    here = array.sharding.addressable_devices_indices_map(array.shape).values()
    return {str(index) for index in everywhere} == {str(index) for index in here}


def _one(entry: int) -> tuple[int, int]:
    return entry, entry + 1


def _overlaps(
    array: jax.Array, where: Ranges, *, apart: bool
) -> list[tuple[Ranges, jax.Array | np.ndarray]]:
    """Returns the parts of a range that the local shards hold: their ranges, and the values, which
    may still be being computed."""
    found: dict[Ranges, jax.Array | np.ndarray] = {}
    for shard in array.addressable_shards:
        spans = [s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)]
        both = tuple(
            (max(low, first), min(high, last))
            for (low, high), (first, last) in zip(where, spans, strict=True)
        )
        if both in found or any(low >= high for low, high in both):
            continue
        starts = [low - first for (low, _), (first, _) in zip(both, spans, strict=True)]
        sizes = tuple(high - low for low, high in both)
        if apart or shard.device.platform != "cpu":
            found[both] = _cut(shard.data, np.asarray(starts, np.int32), sizes=sizes)
        else:  # these weights never change, so their memory is read directly
            whole = np.asarray(shard.data)
            cut = zip(starts, sizes, strict=True)
            found[both] = whole[tuple(slice(start, start + size) for start, size in cut)]
    return list(found.items())


@functools.partial(jax.jit, static_argnames="sizes")
def _cut(array: jax.Array, starts: jax.Array, *, sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, list(starts), sizes)


def _assembled(parts: Sequence[tuple[Ranges, jax.Array | np.ndarray]], where: Ranges) -> np.ndarray:
    """Joins parts into the array of a range."""
    if len(parts) == 1:
        return np.asarray(parts[0][1])
    whole = np.empty([high - low for low, high in where], parts[0][1].dtype)
    for ranges, values in parts:
        spans = zip(ranges, where, strict=True)
        whole[tuple(slice(a - low, b - low) for (a, b), (low, _) in spans)] = values
    return whole


def serve_weights(
    deployment: Deployment, blocks: Sequence[HeldBlock], slots: "ExpertSlots | None", token: str
) -> WeightsServer:
    """Serves a worker's weights at `weights.address`; raises ConfigError if it cannot be listened
    on. Called by `weights.py`."""
    settings = deployment.weights
    server = WeightsServer(
        settings.address,
        weights_hello(deployment.model),
        token,
        HeldWeights(blocks, slots),
        bytes_per_second=settings.serve_mb_per_second * 1e6,
    )
    try:
        logger.info("weights: served at %s", server.start())
    except ConfigError as error:
        raise ConfigError(f"weights.address: {error}") from None
    return server
