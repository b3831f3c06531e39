"""Pages of a prompt that several DP groups compute (`engine/spread.py`), exchanged in every layer.
Loaded for steps with such a prompt."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.model.attention.batch import RaggedBatch
from pallas_kernels.attention.api import write_rows


class ExchangedPages(NamedTuple):
    """Pages of one prompt that DP groups compute in this step and exchange in every layer."""

    slot: Int[Array, " 1"]
    """The prompt's slot in this group, counted from 1; 0: it does not take part."""
    places: Int[Array, " groups_pages"]
    """Places in the prompt of the pages that each group computes, group after group; -1: none."""

    @classmethod
    def of(cls, batch: RaggedBatch, slot: Int[Array, " 1"], page_size: int) -> "ExchangedPages":
        """Collects the places of the pages that all groups' tokens in these slots lie in."""
        own = (batch.sequence_of_token == slot - 1) & (batch.position >= 0)
        first = jnp.min(jnp.where(own, batch.position, jnp.iinfo(jnp.int32).max)) // page_size
        last = jnp.max(jnp.where(own, batch.position, -1)) // page_size
        place = first + jnp.arange(-(-len(own) // page_size) + 1, dtype=jnp.int32)
        place = jnp.where(jnp.any(own) & (place <= last), place, -1)
        return cls(slot, jax.lax.all_gather(place, "dp", tiled=True))

    def exchange(self, pages: tuple[Array, ...], table: Array) -> tuple[Array, ...]:
        """Writes the pages that all groups have computed of the prompt into this group's own.

        Args:
          pages: a layer's cache, with this group's rows of the step.
          table: the page table of the layer.
        """
        taken, size = (self.slot > 0) & (self.places >= 0), pages[0].shape[2]
        of_groups = table[self.slot[0] - 1, self.places].reshape(jax.lax.axis_size("dp"), -1)
        own = of_groups[jax.lax.axis_index("dp")]

        def rows(array: Array) -> Array:
            found = jnp.moveaxis(jax.lax.all_gather(array[own], "dp", tiled=True), 2, 1)
            return found.reshape(-1, *found.shape[2:])

        place = self.places[:, None] * size + jnp.arange(size, dtype=jnp.int32)
        position = jnp.where(taken[:, None], place, -1).reshape(-1)
        slots = jnp.broadcast_to(self.slot - 1, position.shape)
        return write_rows(pages, tuple(map(rows, pages)), table, slots, position)
