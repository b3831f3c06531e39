"""How pieces move between meshes: two transports behind one call.

A transport is built once per direction and message shape; `transport(outputs)` enqueues the copies
of one message and returns the receiver's arrays at once. `device_put` copies device to device
inside one JAX runtime, also between processes; `ppermute` runs one jitted collective on the union
of both meshes. Processes that own no sender pass `placeholders()`. Knows nothing of attention and
ffn.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxserve.link.route import Route, rounds
from jaxserve.mesh import cached_sharding, has_local_devices

TransportKind = Literal["device_put", "ppermute"]
Arrays = Sequence[jax.Array]
Copy = Callable[[Arrays], Arrays]
"""Takes one array and returns one, each in a sequence: so the C++ call needs no wrapping."""


def piece_sharding(mesh: Mesh) -> NamedSharding:
    """One piece of rows on every device of the mesh, in mesh order."""
    return cached_sharding(mesh, PartitionSpec(tuple(mesh.axis_names)))


def make_transport(
    kind: TransportKind,
    route: Route,
    source: Mesh,
    destination: Mesh,
    piece: tuple[int, int],
    dtype: jnp.dtype,
) -> "Transport":
    """A transport for messages of `route.sends` arrays of one `piece` [rows, width] a device."""
    cls = DevicePutTransport if kind == "device_put" else PermuteTransport
    return cls(route, source, destination, piece, dtype)


class Transport(abc.ABC):
    """Moves messages of one shape in one direction."""

    def __init__(
        self,
        route: Route,
        source: Mesh,
        destination: Mesh,
        piece: tuple[int, int],
        dtype: jnp.dtype,
    ):
        self.route = route
        self.dtype = dtype
        self.piece = piece
        self.source_devices = list(source.devices.flat)
        self.destination_devices = list(destination.devices.flat)
        self.source_sharding = piece_sharding(source)
        self.destination_sharding = piece_sharding(destination)
        self.sent_shape = (route.senders * piece[0], piece[1])
        self.received_shape = (route.receivers * piece[0], piece[1])

    @abc.abstractmethod
    def __call__(self, outputs: Arrays) -> Arrays:
        """Enqueues one message's copies.

        Args:
          outputs: the sending program's `route.sends` arrays, one piece on each of its devices.

        Returns:
          the receiving program's `route.receives` arrays, likewise.
        """

    def bind(self) -> Callable[[Arrays], Arrays]:
        """What a hot loop calls in this transport's place: the same, with fewer Python frames."""
        return self.__call__

    def placeholders(self) -> list[jax.Array]:
        """What a process without sending devices passes; the same objects every time."""
        return [_absent(self.sent_shape, self.source_sharding, self.dtype)] * self.route.sends


class DevicePutTransport(Transport):
    """Copies piece by piece, or the whole sharded array where device i sends to device i.

    One copy a call: a list of arrays in one call is paired up wrongly between processes (seen with
    jax 0.12 on CPU), single arrays are not. And every copy in every process: JAX pairs the two ends
    by how many copies each process has made, also where it owns neither end.
    """

    def __init__(
        self,
        route: Route,
        source: Mesh,
        destination: Mesh,
        piece: tuple[int, int],
        dtype: jnp.dtype,
    ):
        super().__init__(route, source, destination, piece, dtype)
        make_copy = fast_copy()
        self._copy_whole = make_copy(self.destination_sharding) if route.whole else None
        here = jax.process_index()
        local_sources = [d for d in self.source_devices if d.process_index == here]
        self._place_of_source = {d: place for place, d in enumerate(local_sources)}
        self._single = {d: SingleDeviceSharding(d) for d in self.source_devices}
        self._copy_to = {d: make_copy(SingleDeviceSharding(d)) for d in self.destination_devices}
        self._edges = [
            (edge, self.source_devices[edge.source], self.destination_devices[edge.destination])
            for edge in route.edges
        ]
        self._here = here

    def __call__(self, outputs: Arrays) -> Arrays:
        if self._copy_whole is not None:
            return self._copy_whole(outputs)
        received: list[list[jax.Array]] = [[] for _ in range(self.route.receives)]
        for edge, source, destination in self._edges:
            if source in self._place_of_source:
                piece = outputs[edge.output].addressable_data(self._place_of_source[source])
            else:
                piece = _absent(self.piece, self._single[source], self.dtype)
            (arrived,) = self._copy_to[destination]([piece])
            if destination.process_index == self._here:
                received[edge.input].append(arrived)
        return [self._assemble(pieces) for pieces in received]

    def bind(self) -> Callable[[Arrays], Arrays]:
        """The whole copy itself, where there is one."""
        return self._copy_whole or self.__call__

    def _assemble(self, pieces: list[jax.Array]) -> jax.Array:
        return jax.make_array_from_single_device_arrays(
            self.received_shape, self.destination_sharding, pieces, dtype=self.dtype
        )


class PermuteTransport(Transport):
    """One collective program on the union of both meshes, a `ppermute` a round of the route."""

    def __init__(
        self,
        route: Route,
        source: Mesh,
        destination: Mesh,
        piece: tuple[int, int],
        dtype: jnp.dtype,
    ):
        super().__init__(route, source, destination, piece, dtype)
        self._local = has_local_devices(source) or has_local_devices(destination)
        union = Mesh(np.array(self.source_devices + self.destination_devices), ("devices",))
        self._sharding = cached_sharding(union, PartitionSpec("devices"))
        self._shape = (union.size * piece[0], piece[1])
        here = jax.process_index()
        self._idle = [
            jax.device_put(np.zeros(piece, dtype), SingleDeviceSharding(d))
            for d in self.destination_devices
            if d.process_index == here
        ]
        self._receivers = {d for d in self.destination_devices if d.process_index == here}
        if self._local:
            self._permute = self._compile(union)

    def _compile(self, union: Mesh) -> jax.stages.Compiled:
        body = functools.partial(_permute_pieces, self.route)
        spec = PartitionSpec("devices")
        program = jax.jit(
            jax.shard_map(body, mesh=union, in_specs=spec, out_specs=spec, check_vma=False)
        )
        argument = jax.ShapeDtypeStruct(self._shape, self.dtype, sharding=self._sharding)
        return program.lower(*[argument] * self.route.sends).compile()

    def __call__(self, outputs: Arrays) -> Arrays:
        united = [
            jax.make_array_from_single_device_arrays(
                self._shape,
                self._sharding,
                [shard.data for shard in output.addressable_shards] + self._idle,
                dtype=self.dtype,
            )
            for output in outputs
        ]
        return [
            jax.make_array_from_single_device_arrays(
                self.received_shape,
                self.destination_sharding,
                [s.data for s in array.addressable_shards if s.device in self._receivers],
                dtype=self.dtype,
            )
            for array in self._permute(*united)
        ]


def _permute_pieces(route: Route, *outputs: jax.Array) -> tuple[jax.Array, ...]:
    """Inside `shard_map` over senders then receivers: every round one `ppermute`."""
    me = jax.lax.axis_index("devices")
    inputs = [jnp.zeros_like(outputs[0])] * route.receives
    for edges in rounds(route):
        chosen = np.zeros(route.senders + route.receivers, np.int32)
        slot = np.full(route.senders + route.receivers, -1, np.int32)
        for edge in edges:
            chosen[edge.source] = edge.output
            slot[route.senders + edge.destination] = edge.input
        payload = jax.lax.select_n(jnp.asarray(chosen)[me], *outputs)
        pairs = [(edge.source, route.senders + edge.destination) for edge in edges]
        arrived = jax.lax.ppermute(payload, "devices", pairs)
        inputs = [jnp.where(jnp.asarray(slot)[me] == i, arrived, x) for i, x in enumerate(inputs)]
    return tuple(inputs)


@functools.lru_cache(maxsize=1024)
def _absent(shape: tuple[int, ...], sharding: jax.sharding.Sharding, dtype: jnp.dtype) -> jax.Array:
    """An array of which this process holds no shard: its part in a copy between others' devices."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def public_copy(sharding: jax.sharding.Sharding) -> Copy:
    """Copies through JAX's public interface: about eight jitted calls' worth of host time."""
    return lambda arrays: [jax.device_put(x, sharding) for x in arrays]


@functools.cache
def fast_copy() -> Callable[[jax.sharding.Sharding], Copy]:
    """Makes the C++ copy under `device_put`, or `device_put` where that is not as expected.

    Private to JAX, so it proves itself first: a copy to a local device must arrive unchanged.
    """
    device = jax.local_devices()[-1]
    sharding = SingleDeviceSharding(device)
    probe = jax.device_put(np.arange(7, dtype=np.int32), jax.local_devices()[0])
    try:
        (arrived,) = _private_copy(sharding)([probe])
        if arrived.sharding == sharding and np.array_equal(arrived, np.arange(7)):
            return _private_copy
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        pass
    return public_copy


def _private_copy(sharding: jax.sharding.Sharding) -> Copy:
    from jax._src.lib import xla_client

    batched = xla_client.batched_copy_array_to_devices_with_sharding
    devices, shardings = [sharding._internal_device_list], [sharding]
    reuse = [xla_client.ArrayCopySemantics.REUSE_INPUT]
    return lambda arrays: batched(arrays, devices, shardings, reuse)
