"""Moves messages by one collective on the union of both meshes, with a `ppermute` for each slot."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.config.topology import Transport
from jaxserve.link.dispatch.ends import Arrays
from jaxserve.link.dispatch.mesh_transport import Direction, MeshTransport
from jaxserve.link.dispatch.route import Route
from jaxserve.link.dispatch.shards import fast_shards
from jaxserve.mesh import cached_sharding

TRANSPORT = Transport(collective=True, automatic="TPU hosts")


class PermuteTransport(MeshTransport):
    """A `MeshTransport` of one jitted collective."""

    def prepare(self) -> None:
        """Compiles the collective."""
        piece, dtype = self.piece, self.dtype
        union = Mesh(np.array(self.attention_devices + self.ffn_devices), ("devices",))
        sharding = cached_sharding(union, PartitionSpec("devices"))
        shape = (union.size * piece[0], piece[1])
        own = self.destination.local_devices
        self._idle = [jax.device_put(np.zeros(piece, dtype), device) for device in own]
        # A process's shards lie in the order of the union: attention's first.
        to_ffn = self.direction == "dispatch"
        sent = len(self.source.local_devices)
        self._received = slice(sent, None) if to_ffn else slice(0, len(own))
        self._shards, assemble = fast_shards()
        self._unite = assemble(shape, dtype, sharding)
        self._assemble = assemble(self.received_shape, dtype, self.destination_sharding)
        body = functools.partial(_permute, self.direction, self.route)
        spec = PartitionSpec("devices")
        program = jax.jit(
            jax.shard_map(body, mesh=union, in_specs=spec, out_specs=spec, check_vma=False)
        )
        argument = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        inputs = 1 if to_ffn else self.route.slots
        self._program = program.lower(*[argument] * inputs).compile()

    def copier(self) -> Callable[[Arrays], Arrays]:
        return self._exchange

    def _exchange(self, arrays: Arrays) -> Arrays:
        shards, received = self._shards, self._received
        united = [self._unite(self._parts(shards(array))) for array in arrays]
        return [self._assemble(shards(array)[received]) for array in self._program(*united)]

    def _parts(self, pieces: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Adds room for what arrives to the pieces of a message."""
        return [*pieces, *self._idle] if self.direction == "dispatch" else [*self._idle, *pieces]


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


OPENS = PermuteTransport
