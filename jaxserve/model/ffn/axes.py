"""The mesh axes of an exchange, and the instances that its devices make up.

Called by `exchange.py`, inside its `shard_map`. Knows numbers of devices and rows, not what rows
mean.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


class Axes(NamedTuple):
    """The mesh axes of an exchange."""

    experts: str
    """Routed experts are divided over it, and over `instance` before."""
    tensor: str
    """Every expert's d_ff is divided over it."""
    rows: tuple[str, ...]
    """Over which the devices' own rows differ: both, major first, or `experts` alone if the devices
    of `tensor` hold the same rows."""
    instance: str | None = None
    """Over its devices are instances, each of which has all rows, exchanges them inside, and makes
    its share of the results, which who sent the rows adds up. Of its own rows a device has those of
    the same device of every instance, block after block, its instance's first (`link/route.py`)."""

    @property
    def split(self) -> bool:
        """Whether the devices of `tensor` have different rows."""
        return self.tensor in self.rows

    @property
    def instances(self) -> int:
        """How many there are."""
        return 1 if self.instance is None else jax.lax.axis_size(self.instance)

    @property
    def peers(self) -> int:
        """Devices of an instance whose rows differ."""
        return jax.lax.axis_size(self.rows)

    @property
    def ranks(self) -> int:
        """Of an instance."""
        return jax.lax.axis_size(self.experts)

    def first_rank(self) -> Int32[Array, ""] | int:
        """Of this instance, among those of all."""
        return 0 if self.instance is None else jax.lax.axis_index(self.instance) * self.ranks

    def rank(self) -> Int32[Array, ""]:
        """This one's, among those of all instances."""
        return self.first_rank() + jax.lax.axis_index(self.experts)

    def device(self) -> Int32[Array, ""]:
        """This one's number among its instance's peers."""
        return jax.lax.axis_index(self.rows)

    def position(self, device: Int[Array, "..."] | int, rows: int) -> Int32[Array, "..."]:
        """Which rows, counted in all instances alike, are the own ones of devices of this instance.

        Args:
          rows: of a device.
        """
        assert self.instance is not None
        of_block = rows // self.instances
        row = jnp.arange(rows, dtype=jnp.int32)
        from_ = (jax.lax.axis_index(self.instance) - row // of_block) % self.instances * self.peers
        return (from_ + jnp.asarray(device)[..., None]) * of_block + row % of_block
