"""Weights and KV pages of a role, as its worker passes them to programs: flat, sharded arrays.

Filled block by block from a checkpoint (`checkpoint/hf.py`) or at random for benches; a process
reads what its own devices hold. Colocated mode stacks the layers of a run.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.config.deployment import Deployment
from jaxserve.mesh import Rules, cached_sharding, sharded_zeros
from jaxserve.model.attention.kv_cache import PAGES_SPEC
from jaxserve.model.module import Template
from jaxserve.progress import Progress

Leaves = tuple[jax.Array, ...]


class LeafSource(Protocol):
    """Where leaves come from."""

    on_read: Callable[[int], None]
    """Called with the number of bytes of every read, from any thread."""

    @property
    def storage(self) -> "LeafSource":
        """Itself, or where it reads what no running worker gives it."""
        ...

    def leaves(
        self,
        template: Template,
        sources: Sources | Sequence[Sources],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> Iterable[jax.Array]:
        """One block's leaves on their devices, made one by one; or those of several blocks of one
        kind, behind each other in a new first axis."""
        ...

    def check(self) -> None:
        """Called when everything is loaded; raises CheckpointError where that was damaged."""
        ...


OpenSource = Callable[[Deployment, CheckpointNames], LeafSource]
"""Where a deployment's weights come from: `checkpoint.store.open_folder`, or
`checkpoint.peer.open_weights`."""


class HeldBlock(NamedTuple):
    """A block of the checkpoint as a worker has it."""

    name: str
    """As `checkpoint.manifest.blocks_of` names it."""
    sources: Sources
    template: Template
    leaves: Callable[[], Leaves]
    """Those of this moment: moves of experts replace them."""
    layer: int = -1
    """Of an attention or ffn block."""
    entry: int | None = None
    """In leaves that are stacks of several layers'."""


class _CountedLeaves:
    """Another source, with every block counted."""

    def __init__(self, source: LeafSource, progress: Progress):
        self._source, self._progress = source, progress
        self.on_read, self.check = source.on_read, source.check

    @property
    def storage(self) -> LeafSource:
        """The source's."""
        return self._source.storage

    def leaves(
        self,
        template: Template,
        sources: Sources | Sequence[Sources],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> Iterator[jax.Array]:
        """The source's leaves."""
        yield from self._source.leaves(template, sources, shardings)
        self._progress.advance(1 if isinstance(sources, dict) else len(sources))


@contextlib.contextmanager
def load_progress(source: LeafSource, blocks: int) -> Iterator[LeafSource]:
    """The source, with the progress of its blocks and bytes shown.

    A process reads a part of the files that is not known before. The time left therefore follows
    from its own blocks.
    """
    with Progress("load", blocks, process=jax.process_index()) as progress:
        source.on_read = lambda size: progress.advance(0, size=size)
        yield _CountedLeaves(source, progress)
    source.check()


def load_leaves(
    source: LeafSource,
    template: Template,
    sources: Sources | Sequence[Sources],
    mesh: Mesh,
    rules: Rules,
) -> Leaves:
    """Leaves of one block, divided over a mesh by its rules; or of several blocks of one kind,
    stacked along a new first axis."""
    stacked = () if isinstance(sources, dict) else (None,)
    specs = [PartitionSpec(*stacked, *spec) for spec in template.specs(rules)]
    return tuple(source.leaves(template, sources, [cached_sharding(mesh, s) for s in specs]))


def zeroed(arrays: Sequence[jax.ShapeDtypeStruct], mesh: Mesh) -> Sequence[jax.Array]:
    """Pages of these global shapes, made on their devices."""
    sharding = cached_sharding(mesh, PAGES_SPEC)
    return [sharded_zeros(array.shape, array.dtype, sharding) for array in arrays]
