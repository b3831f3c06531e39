"""The mesh axes of an exchange, and the instances that its devices make up.

Called by `exchange.py`, inside its `shard_map`. Knows numbers of devices and rows, not what rows
mean.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, Shaped


class Axes(NamedTuple):
    """The mesh axes of an exchange."""

    experts: str
    """Routed experts are divided over it."""
    tensor: str
    """Every expert's d_ff is divided over it."""
    rows: tuple[str, ...]
    """Over which the devices' own rows differ: both, major first, or `experts` alone if the devices
    of `tensor` hold the same rows."""
    instances: int = 1
    """Equal parts of `experts`, each of which has all rows, exchanges them inside, and makes its
    share of the results, which who sent the rows adds up. Of its own rows a device has those of the
    same device of every instance, block after block, its instance's first (`link/route.py`)."""

    @property
    def split(self) -> bool:
        """Whether the devices of `tensor` have different rows."""
        return self.tensor in self.rows

    @property
    def peers(self) -> int:
        """Devices of an instance whose rows differ."""
        return jax.lax.axis_size(self.rows) // self.instances

    @property
    def ranks(self) -> int:
        """Of an instance."""
        return jax.lax.axis_size(self.experts) // self.instances

    def device(self) -> Int32[Array, ""]:
        """This one's number among its instance's peers."""
        return jax.lax.axis_index(self.rows) % self.peers

    def position(self, device: Int[Array, "..."] | int, rows: int) -> Int32[Array, "..."]:
        """Which rows, counted in all instances alike, are the own ones of devices of this instance.

        Args:
          rows: of a device.
        """
        of_block = rows // self.instances
        instance = jax.lax.axis_index(self.rows) // self.peers
        row = jnp.arange(rows, dtype=jnp.int32)
        from_ = (instance - row // of_block) % self.instances * self.peers
        return (from_ + jnp.asarray(device)[..., None]) * of_block + row % of_block


def own_part(rows: Shaped[Array, "rows width"], axes: Axes) -> Shaped[Array, "part width"]:
    """Of a device's own rows those for which it has to do what one instance alone does."""
    return rows[: rows.shape[0] // axes.instances]


def in_part(results: Float[Array, "part d_model"], axes: Axes) -> Float[Array, "rows d_model"]:
    """The results of that, among zeros for the others."""
    return jnp.pad(results, ((0, (axes.instances - 1) * results.shape[0]), (0, 0)))
