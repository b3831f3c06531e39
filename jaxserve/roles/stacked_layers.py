"""Runs of equal layers whose leaves are stacked along a first axis, for scans over layers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jaxserve.config.model import LayerKind
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.module import Template
from jaxserve.roles.token_programs import TokenPrograms
from pallas_kernels.input_major import InputMajor
from pallas_kernels.quantize import StackEntry, sliceable
from pallas_kernels.quantize.words import LANES
from pallas_kernels.target import current_target


class StackedLeaves(NamedTuple):
    """Leaves of one block of a run's layers, by their place in the block.

    A scan would copy a layer's experts, matrices that lie input by input, and on TPUs quantised
    matrices before every use. Products with these take the whole stack and find their layer;
    experts of all layers are in one row. TPUs keep a matrix whose width is no multiple of 128
    with its axes swapped. A branch of a program would take it in order, and copy the stack, so its
    axes are swapped by name, which moves nothing.
    """

    whole: dict[int, Any]
    """Leaves that stay whole stacks."""
    sliced: dict[int, Any]
    """Leaves that the scan slices."""

    @classmethod
    def of(cls, template: Template, stacks: Sequence[Array | None]) -> "StackedLeaves":
        """Divides the stacked leaves of a block. None: the leaf has no stack of its own."""
        whole: dict[int, Any] = {}
        sliced: dict[int, Any] = {}
        multiplied_in_stacks = current_target().backend == "mosaic_tpu"
        held = {place: sliceable(stack) for place, stack in enumerate(stacks) if stack is not None}
        for place, stack in held.items():
            if template.leaves[place].of_slots:
                whole[place] = stack.reshape(-1, *stack.shape[2:])
            elif template.leaves[place].input_major:
                whole[place] = InputMajor(stack)
            elif template.leaves[place].quantised and multiplied_in_stacks:
                swapped = stack.shape[-1] > LANES and stack.shape[-1] % LANES > 0
                kept = stack.swapaxes(-1, -2) if swapped else stack
                whole[place] = StackEntry(kept, None, swapped)
            else:
                sliced[place] = stack
        return cls(whole, sliced)

    def of_layer(self, sliced: dict[int, Any], layer: Array) -> list[Any]:
        """Returns the leaves of one layer of the run, in the order of the block.

        Args:
          sliced: entries of `self.sliced` for this layer.
        """
        leaves = self.whole | sliced
        return [_of_layer(leaves[place], layer) for place in range(len(leaves))]


def scanned(layers: int, stacks: Sequence[StackedLeaves], tables: Array | None = None) -> Any:
    """Returns the inputs that a scan over a run cuts into layers: places in the run, the `sliced`
    leaves of the blocks, and tables of experts."""
    return jnp.arange(layers, dtype=jnp.int32), [stack.sliced for stack in stacks], tables


def with_own_pages(
    programs: TokenPrograms, kind: LayerKind, start: int, layer: Array, batch: RaggedBatch
) -> tuple[slice, RaggedBatch]:
    """Returns where the page arrays of a layer are among those of all layers
    (`TokenPrograms.all_pages`), and the batch with a page table that points at the layer's part.

    Args:
      kind, start, layer: kind and first layer of a run, and the layer's place in the run.
    """
    pool = programs.pool(kind)
    at = programs.pools.index(pool)
    first = sum(len(before.arrays) for before in programs.pools[:at])
    # Pages of the layers before, in each of the tables, whose entries take turns.
    pages = jnp.asarray(pool.pages, jnp.int32) * (pool.layers.index(start) + layer)
    table = batch.page_table
    shifted = table + jnp.tile(pages, table.shape[1] // programs.tables)
    return slice(first, first + len(pool.arrays)), batch._replace(page_table=shifted)


def _of_layer(
    leaf: Array | InputMajor | StackEntry, layer: Array
) -> Array | InputMajor | StackEntry:
    if isinstance(leaf, StackEntry):
        return StackEntry(leaf.stack, layer, leaf.swapped)
    return InputMajor(leaf.values, layer) if isinstance(leaf, InputMajor) else leaf
