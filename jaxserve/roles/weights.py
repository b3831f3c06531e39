"""Weights and KV pages of a role, as its worker passes them to programs: flat, sharded arrays.

Filled block by block from a checkpoint (`checkpoint/hf.py`) or at random for benches. A process
reads only the parts that its own devices hold. Colocated mode stacks the layers of a run.
"""

import contextlib
import functools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxserve.checkpoint.arrays import LeafSource
from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.config.deployment import Deployment
from jaxserve.mesh import Rules, cached_sharding
from jaxserve.model.module import Template
from jaxserve.progress import Progress

if TYPE_CHECKING:  # an ffn worker in a runtime of its own has no attention blocks
    from jaxserve.link.weights.server import WeightsServer
    from jaxserve.model.blocks import AttentionTemplates
    from jaxserve.roles.expert_slots import ExpertSlots

Leaves = tuple[jax.Array, ...]


OpenSource = Callable[[Deployment, CheckpointNames], LeafSource]
"""Opens the source of a deployment's weights: `checkpoint.opening.open_folder` or
`checkpoint.peer.open_weights`."""


class HeldBlock(NamedTuple):
    """Block of the checkpoint that a worker holds."""

    name: str
    """Name of the block in `checkpoint.manifest.blocks_of`."""
    sources: Sources
    template: Template
    leaves: Callable[[], Leaves]
    """Returns the current leaves; moves of experts replace them."""
    layer: int = -1
    """Layer of an attention or ffn block; -1 for other blocks."""
    entry: int | None = None
    """Index of the block in stacked leaves; None if the leaves are the block's alone."""


def serve_weights(
    deployment: Deployment,
    held: Callable[[], Sequence[HeldBlock]],
    slots: "ExpertSlots | None",
    token: str,
) -> "WeightsServer | None":
    """Hands a worker's blocks out to workers that start, if the deployment has `weights.address`.
    Without one, the modules for it are not loaded. Raises ConfigError if it cannot be listened
    on."""
    if not deployment.weights.address:
        return None
    serve: Any = pkgutil.resolve_name("jaxserve.roles.held_weights:serve_weights")
    return cast("WeightsServer", serve(deployment, held(), slots, token))


@contextlib.contextmanager
def load_progress(source: LeafSource, blocks: int) -> Iterator[None]:
    """Displays the blocks and bytes that a source loads.

    The number of bytes that a process will read is not known in advance. The time left is therefore
    estimated from its blocks.
    """
    with Progress("load", blocks, process=jax.process_index()) as progress:
        source.on_read = lambda size: progress.advance(0, size=size)
        source.on_block = progress.advance
        yield
    source.check()


def load_leaves(
    source: LeafSource,
    template: Template,
    sources: Sources | Sequence[Sources],
    mesh: Mesh,
    rules: Rules,
) -> Leaves:
    """Loads the leaves of one block, divided over a mesh by its rules; or those of several blocks
    of one kind, stacked along a new first axis."""
    stacked = () if isinstance(sources, dict) else (None,)
    specs = [PartitionSpec(*stacked, *spec) for spec in template.specs(rules)]
    made = tuple(source.leaves(template, sources, [cached_sharding(mesh, spec) for spec in specs]))
    source.on_block(len(sources) if stacked else 1)
    return made


class RoleWeights:
    """Weights of a worker: blocks of the checkpoint, each alone or in a stack of equal layers.

    Attributes:
      blocks: leaves of the attention, ffn and prediction blocks, or of their stacks, in the order
        in which they were added.
      held: blocks of the checkpoint that this process holds.
    """

    def __init__(self, source: LeafSource, mesh: Mesh):
        self._source, self._mesh = source, mesh
        self.blocks: list[Leaves] = []
        self.held: list[HeldBlock] = []
        # Numbers of the blocks with experts, and places in the block of the leaves with slots.
        self._banks: list[tuple[int, Sequence[int]]] = []

    def add(
        self,
        part: str,
        template: Template,
        sources: Sources | Sequence[Sources],
        rules: Rules,
        first: int,
    ) -> Leaves:
        """Loads a block of layer `first`, or a stack of those of the layers from there on."""
        number, alone = len(self.blocks), isinstance(sources, dict)
        made = load_leaves(self._source, template, sources, self._mesh, rules)
        self.blocks.append(made)
        if places := [place for place, leaf in enumerate(template.leaves) if leaf.of_slots]:
            self._banks.append((number, places))
        leaves = functools.partial(self.blocks.__getitem__, number)
        of_layers = cast(Sequence[Sources], [sources] if alone else sources)
        for layer, own in enumerate(of_layers, first):
            entry, name = None if alone else layer - first, f"layers.{layer}.{part}"
            self.held.append(HeldBlock(name, own, template, leaves, layer, entry))
        return made

    def add_ends(
        self, templates: "AttentionTemplates", names: CheckpointNames, rules: Rules
    ) -> tuple[Leaves, Leaves]:
        """Loads embedding and head."""

        def load(name: str, template: Template, sources: Sources) -> Leaves:
            leaves = load_leaves(self._source, template, sources, self._mesh, rules)
            self.held.append(HeldBlock(name, sources, template, lambda: leaves))
            return leaves

        embedding = load("embedding", templates.embedding, names.embedding)
        return embedding, load("head", templates.head, names.head)

    def of_slots(self, number: int) -> Leaves:
        """The arrays of a bank's slots: leaves with an entry for each slot."""
        block, places = self._banks[number]
        return tuple(self.blocks[block][place] for place in places)

    def replace_slots(self, number: int, arrays: Sequence[jax.Array]) -> None:
        """Replaces what `of_slots` returns."""
        block, places = self._banks[number]
        new = dict(zip(places, arrays, strict=True))
        self.blocks[block] = tuple(new.get(n, leaf) for n, leaf in enumerate(self.blocks[block]))
