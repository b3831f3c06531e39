"""The mesh axes of an exchange, and the instances that its devices form.

Called by `exchange.py`, inside its `shard_map`. Knows numbers of devices and rows, not what rows
mean.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


class Axes(NamedTuple):
    """The mesh axes of an exchange."""

    experts: str | tuple[str, ...]
    """Axis that divides routed experts, after `instance`; or several, major first."""
    tensor: str
    """Axis that divides every expert's d_ff."""
    rows: tuple[str, ...]
    """Axes over which the devices' own rows differ: both, major first, or `experts` alone if the
    devices of `tensor` hold the same rows."""
    instance: str | None = None
    """Axis over instances. Each instance has all rows, exchanges them among its own devices, and
    computes a share of the results; the senders of the rows add the shares up. A device's own rows
    are those of the same device of every instance, block after block, its own instance's first
    (`link/dispatch/contract.py`)."""
    before: int = 0
    """Coordinates on `instance` before the first one, which are devices of the other role
    (`roles/step_programs.py`). Devices of all instances then have their rows in one order."""

    @property
    def split(self) -> bool:
        """Returns whether the devices of `tensor` have different rows."""
        return self.tensor in self.rows

    @property
    def instances(self) -> int:
        """Number of instances."""
        return 1 if self.instance is None else jax.lax.axis_size(self.instance) - self.before

    @property
    def peers(self) -> int:
        """Devices of an instance whose rows differ."""
        return jax.lax.axis_size(self.rows)

    @property
    def ranks(self) -> int:
        """Ranks of an instance."""
        return jax.lax.axis_size(self.experts)

    def first_rank(self) -> Int32[Array, ""] | int:
        """Returns the number of this instance's first rank among the ranks of all instances."""
        at = 0 if self.instance is None else jax.lax.axis_index(self.instance) - self.before
        return at * self.ranks

    def rank(self) -> Int32[Array, ""]:
        """Returns this device's rank among the ranks of all instances."""
        return self.first_rank() + jax.lax.axis_index(self.experts)

    def position(self, device: Int[Array, "..."] | int, rows: int) -> Int32[Array, "..."]:
        """Returns the numbers of the rows that devices of this instance own; all instances count
        rows alike.

        Args:
          rows: number of rows of a device.
        """
        assert self.instance is not None
        blocks = 1 if self.before else self.instances
        of_block, row = rows // blocks, jnp.arange(rows, dtype=jnp.int32)
        from_ = (jax.lax.axis_index(self.instance) - row // of_block) % blocks * self.peers
        return (from_ + jnp.asarray(device)[..., None]) * of_block + row % of_block
