"""Moves messages by one collective on the union of both meshes, with a `ppermute` for each slot."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.link.ends import Arrays
from jaxserve.link.route import Route
from jaxserve.link.transport import Direction, Transport
from jaxserve.mesh import cached_sharding


class PermuteTransport(Transport):
    """A `Transport` of one jitted collective."""

    def prepare(self) -> None:
        """Compiles the collective."""
        here, piece, dtype = jax.process_index(), self.piece, self.dtype
        union = Mesh(np.array(self.attention_devices + self.ffn_devices), ("devices",))
        self._sharding = cached_sharding(union, PartitionSpec("devices"))
        self._shape = (union.size * piece[0], piece[1])
        self._idle = [
            jax.device_put(np.zeros(piece, dtype), device)
            for device in self.destination.devices.flat
            if device.process_index == here
        ]
        self._receivers = {d for d in self.destination.devices.flat if d.process_index == here}
        body = functools.partial(_permute, self.direction, self.route)
        spec = PartitionSpec("devices")
        program = jax.jit(
            jax.shard_map(body, mesh=union, in_specs=spec, out_specs=spec, check_vma=False)
        )
        argument = jax.ShapeDtypeStruct(self._shape, dtype, sharding=self._sharding)
        inputs = 1 if self.direction == "dispatch" else self.route.slots
        self._program = program.lower(*[argument] * inputs).compile()

    def copier(self) -> Callable[[Arrays], Arrays]:
        return self._exchange

    def _exchange(self, arrays: Arrays) -> Arrays:
        united = [self._unite(array) for array in arrays]
        return [
            jax.make_array_from_single_device_arrays(
                self.received_shape,
                self.destination_sharding,
                [s.data for s in array.addressable_shards if s.device in self._receivers],
                dtype=self.dtype,
            )
            for array in self._program(*united)
        ]

    def _unite(self, array: jax.Array) -> jax.Array:
        """Extends an array over both meshes: the source's pieces, and room for the others."""
        pieces = [shard.data for shard in array.addressable_shards]
        parts = pieces + self._idle if self.direction == "dispatch" else self._idle + pieces
        return jax.make_array_from_single_device_arrays(
            self._shape, self._sharding, parts, dtype=self.dtype
        )


def _permute(direction: Direction, route: Route, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Runs a `ppermute` for each slot, inside `shard_map` over attention and then ffn devices."""
    me = jax.lax.axis_index("devices")
    received: list[jax.Array] = []
    for leg in route.legs:
        pairs = [(a, route.attention + f) for a, f in zip(leg.attention, leg.ffn, strict=True)]
        if direction == "dispatch":
            received.append(jax.lax.ppermute(arrays[0], "devices", pairs))
            continue
        back = jax.lax.ppermute(arrays[leg.slot], "devices", [(f, a) for a, f in pairs])
        if leg.answer == len(received):  # the first of this array
            received.append(back)
            continue
        mine = jnp.zeros(route.attention + route.ffn, bool).at[np.array(leg.attention)].set(True)
        received[leg.answer] = jnp.where(mine[me], back, received[leg.answer])
    return tuple(received)
