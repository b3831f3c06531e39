"""Loads weights from running workers: each array comes from the first worker that holds it in the
wanted format, else from storage.

xDeepServe §6.3 (fast start by forking from a running worker). Nothing is computed on the way: 8-bit
and INT4 matrices travel with their scales (INT4 as one byte per value), as the sending worker
quantised or read them. The result equals, bit for bit, what this worker would have loaded from the
checkpoint. If a worker is lost in the middle of an array, only that array is read again, from the
next source. `link/weights` is the channel, `roles/held_weights.py` the sending end.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.checkpoint.arrays import (
    QUANTISED_PARTS,
    BlockReader,
    FolderReader,
    Leaf,
    block_key,
    block_of,
    make_leaves,
    matrix_of,
    read_leaf,
)
from jaxserve.checkpoint.fingerprint import revision
from jaxserve.checkpoint.manifest import blocks_of
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.checkpoint.regions import Ranges, leaf_shape
from jaxserve.checkpoint.source import CheckpointNames, Shape, Sources
from jaxserve.config.deployment import Deployment
from jaxserve.errors import CheckpointError
from jaxserve.link.session.channel import resolve, split_address
from jaxserve.link.session.hello import Hello, make_hello
from jaxserve.link.weights.client import PeerError, WeightsPeer
from jaxserve.link.weights.frames import HeldArray
from jaxserve.model.module import Template
from jaxserve.storage.mirror import local_folder

logger = logging.getLogger(__name__)

FRESH_SECONDS = 30.0
"""Connections that were idle for longer are reopened: the other end may have closed them."""
AGAIN_SECONDS = 10.0
"""Seconds before workers are tried again after they were unreachable or lost."""


def weights_hello(folder: str) -> Hello:
    """Facts that both ends of a weights channel must agree on: the model and its revision.

    Number formats may differ: every array states its own.

    Raises:
      CheckpointError: the folder holds no model.
    """
    try:
        tree = json.loads((local_folder(folder) / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no model at {folder}: {error}") from None
    facts = {"model": str(tree.get("model_type")), "revision": revision(folder).digest}
    return make_hello("weights", facts)


def open_weights(deployment: Deployment, names: CheckpointNames, *, token: str) -> BlockReader:
    """Opens a deployment's weights: from `weights.peers` if set, with its folder as a fallback.

    Raises:
      CheckpointError: as `open_checkpoint`; with peers only when the folder is first read.
    """

    def storage() -> FolderReader:
        return open_checkpoint(deployment.model, names)

    if deployment.weights.address:
        revision(deployment.model)  # this worker will state it to others
    if not deployment.weights.peers:
        return storage()
    hello = weights_hello(deployment.model)
    return PeerCheckpoint(deployment.weights.peers, hello, token, names, storage)


class _PeerArray(NamedTuple):
    """An array that a running worker holds."""

    peer: WeightsPeer
    block: str
    shape: Shape
    """Without padding."""
    name: str

    def read_into(self, ranges: Ranges, target: np.ndarray) -> int:
        """See `arrays.ReadableArray`; raises PeerError."""
        return self.peer.read(self.block, self.name, ranges, target)


class PeerCheckpoint(BlockReader):
    """Reads leaves from running workers, with storage as a fallback.

    Args:
      peers: host:port of each worker, in order of preference; a name may resolve to several
        addresses.
      hello: identifies this worker's weights; see `weights_hello`.
      token: the secret of the deployment.
      names: tensor names that the architecture expects.
      storage: opens the folder; called when the first array is needed from it.

    Attributes:
      arrays: number of leaves taken so far, by origin (`storage`, or an address).
    """

    def __init__(
        self,
        peers: Sequence[str],
        hello: Hello,
        token: str,
        names: CheckpointNames,
        storage: Callable[[], FolderReader],
    ):
        super().__init__()
        self.arrays: dict[str, int] = {}
        self._names, self._hello, self._token = list(peers), hello, token
        self._open = storage
        self._storage: FolderReader | None = None
        self._blocks = {block_key(block.sources): block.name for block in blocks_of(names)}
        self._peers: list[WeightsPeer] = []
        self._again = self._used = 0.0
        self._look()

    def close(self) -> None:
        """Closes all connections; the next read reopens them."""
        while self._peers:
            self._peers.pop().close()
        self._again = 0.0

    def block(
        self, template: Template, leaves: dict[str, Leaf], tables: Sequence[Sources]
    ) -> Iterator[jax.Array]:
        """Yields the wanted leaves of one block, or of several stacked blocks."""
        self._look()
        blocks = [self._blocks[block_key(sources)] for sources in tables]

        def make(name: str, *parts: Leaf) -> Sequence[jax.Array]:
            kinds = QUANTISED_PARTS[: len(parts)]
            names = [f"{name}.{kind}" for kind in kinds] if len(parts) > 1 else [name]
            return self._take(template, blocks, tables, dict(zip(names, parts, strict=True)))

        return make_leaves(leaves, make)

    def _take(
        self,
        template: Template,
        blocks: Sequence[str],
        tables: Sequence[Sources],
        wanted: dict[str, Leaf],
    ) -> list[jax.Array]:
        """Takes a leaf, or all leaves of a quantised matrix, from the first source that has it."""
        shapes = [_stored_shapes(table, wanted) for table in tables]
        # Leaves with pieces of another matrix as entries are assembled from storage only.
        parted = any(matrix_of(name) in template.parts for name in wanted)
        for peer in [] if parted else list(self._peers):
            if not all(_has(peer, b, s, wanted) for b, s in zip(blocks, shapes, strict=True)):
                continue
            try:
                made = [
                    self._from_peer(peer, blocks, name, leaf, [s[name] for s in shapes])
                    for name, leaf in wanted.items()
                ]
            except PeerError as error:
                self._lose(peer, str(error), f"{blocks[0]}, {', '.join(wanted)}")
                continue
            self._count(peer.address, len(wanted))
            return made
        if self._peers and "storage" not in self.arrays:
            logger.info("weights: no worker has %s, %s so: from storage", blocks[0], [*wanted])
        self._count("storage", len(wanted))
        return list(self.storage.block(template, wanted, tables))

    def _from_peer(
        self,
        peer: WeightsPeer,
        blocks: Sequence[str],
        name: str,
        leaf: Leaf,
        shapes: Sequence[Shape],
    ) -> jax.Array:
        arrays = [_PeerArray(peer, *where, name) for where in zip(blocks, shapes, strict=True)]
        empty = 1.0 if name.endswith(".scales") else 0.0
        return read_leaf(arrays, leaf, self.on_read, empty=empty)

    @property
    def storage(self) -> FolderReader:
        """The checkpoint in the folder, opened on first use; raises CheckpointError."""
        if self._storage is None:
            self._storage = self._open()
            self._storage.checks = self.checks
        self._storage.on_read = self.on_read
        return self._storage

    def _count(self, source: str, arrays: int) -> None:
        self.arrays[source] = self.arrays.get(source, 0) + arrays

    def _lose(self, peer: WeightsPeer, error: str, what: str) -> None:
        logger.warning("weights: %s; %s and what follows come from elsewhere", error, what)
        peer.close()
        self._peers.remove(peer)
        self._again = time.monotonic() + AGAIN_SECONDS

    def _look(self) -> None:
        """Connects to the workers if none is connected, at most once per `AGAIN_SECONDS`. Drops
        connections that were idle for `FRESH_SECONDS` first."""
        now = time.monotonic()
        if self._peers and now - self._used > FRESH_SECONDS:
            self.close()
        self._used = now
        if self._peers or now < self._again:
            return
        self._again = now + AGAIN_SECONDS
        absent = []
        for address in [found for name in self._names for found in _resolved(name)]:
            try:
                peer = WeightsPeer(address, self._hello, self._token)
            except PeerError as error:
                absent.append(str(error))
                continue
            if peer.worker == self._hello.worker:
                peer.close()
                continue
            logger.info("weights: from %s at %s", peer.worker, address)
            self._peers.append(peer)
        if not self._peers:
            logger.info("weights: from storage: %s", "; ".join(absent) or "no addresses")


def _resolved(name: str) -> list[str]:
    """All addresses of a host:port."""
    try:
        return resolve(*split_address(name))
    except OSError as error:
        logger.info("weights: %s: %s", name, error)
        return []


def _stored_shapes(sources: Sources, wanted: dict[str, Leaf]) -> dict[str, Shape]:
    """Shapes of a block's wanted leaves without padding, by leaf."""
    if len(wanted) == 1:
        (name,) = wanted
        return {name: leaf_shape(sources[name])}
    values, *grids = wanted
    shape = leaf_shape(sources[matrix_of(values)])
    block = block_of(wanted[values].shape, wanted[grids[0]].shape)
    return {values: shape, **dict.fromkeys(grids, scales_shape(shape, block))}


def scales_shape(values: Shape, block: tuple[int, int]) -> Shape:
    """Shape of a quantised matrix's scales without padding, from the shape of its values."""
    *outer, d_out, d_in = values
    return (*outer, -(-d_out // block[0]), -(-d_in // block[1]) if block[1] else 1)


def _has(peer: WeightsPeer, block: str, shapes: dict[str, Shape], wanted: dict[str, Leaf]) -> bool:
    """Whether a worker holds these leaves of a block with the wanted shapes and dtypes."""
    held = [peer.held.get(block, {}).get(name, HeldArray((), "")) for name in wanted]
    there = [(array.shape, array.dtype) for array in held]
    return there == [(shapes[n], np.dtype(leaf.dtype).name) for n, leaf in wanted.items()]
