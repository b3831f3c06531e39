"""Copies device to device inside one runtime, also between its processes.

Each slot takes one copy, however many devices it reaches: the host pays for the pieces of its own
devices and not for those of the other side. If the processes of the two sides do not match one to
one, every pair of processes takes a copy, because JAX refuses copies from one process to several.
Every process takes part in each copy, because JAX pairs the ends of copies by their number; only a
copy inside one of several processes is that process's alone. Calls take single arrays: JAX pairs a
list of arrays wrongly between processes (seen with jax 0.12 on CPU).

On every call JAX's public functions check and look up facts that never change in a hot loop. The
private functions used here instead are tried once (`dispatch/put.py`).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxserve.config.topology import Transport
from jaxserve.link.dispatch.ends import Arrays, piece_sharding
from jaxserve.link.dispatch.mesh_transport import MeshTransport
from jaxserve.link.dispatch.put import fast_put, proved
from jaxserve.link.dispatch.shards import Assemble, fast_shards, public_shards

Copy = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
"""Takes one array and returns one, each in a sequence, so that the C++ call needs no wrapper."""


def public_copy(sharding: jax.sharding.Sharding) -> Copy:
    """Copies through JAX's public interface: about eight jitted calls' worth of host time."""
    return lambda arrays: [jax.device_put(x, sharding) for x in arrays]


@functools.cache
def fast_copy() -> Callable[[jax.sharding.Sharding], Copy]:
    """Makes the C++ copy under `device_put`, or `device_put` if the private call has changed.

    The private call proves itself first: a copy to a local device must arrive unchanged.
    """
    sharding = SingleDeviceSharding(jax.local_devices()[-1])
    probe = jax.device_put(np.arange(7, dtype=np.int32), jax.local_devices()[0])

    def works(make: Callable[[jax.sharding.Sharding], Copy]) -> bool:
        (arrived,) = make(sharding)([probe])
        return arrived.sharding == sharding and np.array_equal(arrived, probe)

    return proved(_private_copy, public_copy, works)


def _private_copy(sharding: jax.sharding.Sharding) -> Copy:
    from jax._src.lib import xla_client

    batched = xla_client.batched_copy_array_to_devices_with_sharding
    devices, shardings = [sharding._internal_device_list], [sharding]
    reuse = [xla_client.ArrayCopySemantics.REUSE_INPUT]
    return lambda arrays: batched(arrays, devices, shardings, reuse)


@functools.cache
def fast_first() -> Callable[[jax.Array], jax.Array]:
    """Returns a function that takes the first of an array's shards in this process. JAX makes all
    shards, 4 µs each, when asked for any, but has one call for replicated arrays."""
    sharding = NamedSharding(Mesh(np.array(jax.local_devices()[:2]), ("x",)), PartitionSpec("x"))
    probe = jax.device_put(np.arange(6, dtype=np.int32).reshape(2, 3), sharding)
    expected = probe.addressable_shards[0].data

    def works(first: Callable[[jax.Array], jax.Array]) -> bool:
        found = first(probe)
        return found.sharding == expected.sharding and np.array_equal(found, expected)

    return proved(_private_first, lambda array: public_shards(array)[0], works)


def _private_first(array: Any) -> jax.Array:
    return array._fully_replicated_shard()


TRANSPORT = Transport(automatic="devices", falls_back_to="ppermute")


class _Leg(NamedTuple):
    """One copy of some devices' pieces of one array."""

    array: int
    """Number of the sender's array."""
    pieces: tuple[int, ...]
    """Places of the copied shards among those of this process."""
    join: Assemble | None
    """Assembles the array to copy from these shards; None copies the whole array."""
    copy: Copy


class DevicePutTransport(MeshTransport):
    """A `MeshTransport` of whole-array copies."""

    def prepare(self) -> None:
        """Finds the copies that this process takes part in, and where their shards go."""
        direction, route, piece, dtype = self.direction, self.route, self.piece, self.dtype
        here = jax.process_index()
        make_copy, self._first = fast_copy(), fast_first()
        self._shards, make_assemble = fast_shards()
        self._assemble = make_assemble(self.received_shape, dtype, self.destination_sharding)
        source, destination = list(self.source.devices.flat), list(self.destination.devices.flat)
        local = [device for device in source if device.process_index == here]
        self._legs = []
        placed: list[list[jax.Device]] = []
        slots: list[int] = []
        answers: list[int] = []
        for leg in route.legs:
            from_, to = (
                (leg.attention, leg.ffn) if direction == "dispatch" else (leg.ffn, leg.attention)
            )
            for pairs in _copies([source[i] for i in from_], [destination[i] for i in to]):
                senders = [sender for sender, _ in pairs]
                receivers = [receiver for _, receiver in pairs]
                ends = {device.process_index for device in senders + receivers}
                if len(ends) == 1 and here not in ends:
                    continue
                taken = tuple(local.index(d) for d in senders if d.process_index == here)
                join = None
                if senders != source:
                    shape = len(senders) * piece[0], piece[1]
                    join = make_assemble(shape, dtype, _line(senders))
                copy = make_copy(
                    self.destination_sharding if receivers == destination else _line(receivers)
                )
                array = leg.slot if direction == "combine" else 0
                self._legs.append(_Leg(array, taken, join, copy))
                placed.append(receivers)
                slots.append(leg.slot)
                answers.append(leg.answer)
        complete = all(receivers == destination for receivers in placed)
        self._fill: list[list[Shard]] | None = None
        if not complete:
            # Every slot is an array on the ffn mesh; on the attention mesh there is one for each
            # instance.
            count, of_legs = route.slots, slots
            if direction == "combine":
                count, of_legs = route.instances, answers
            arrays = [[n for n, of in enumerate(of_legs) if of == at] for at in range(count)]
            self._fill = _fill_orders(placed, arrays, destination, piece, dtype)
        self._copy_whole: Copy | None = None
        if len(self._legs) == 1 and self._legs[0].join is None and complete:
            self._copy_whole = self._legs[0].copy
        elif len(self._legs) == 1 and placed[0] == [
            device for device in destination if device.process_index == here
        ]:
            self._copy_whole = self._put_inside(self._legs[0])

    def copier(self) -> Copy:
        return self._copy_whole or self._copy_legs

    def _copy_legs(self, arrays: Arrays) -> Arrays:
        arrived: list[jax.Array] = []
        for array, pieces, join, copy in self._legs:
            moved = arrays[array]
            if join is not None:
                moved = join(self._take(moved, pieces))
            arrived += copy([moved])
        return arrived if self._fill is None else self._put_together(arrived)

    def _put_inside(self, leg: _Leg) -> Copy | None:
        """Makes a single call for copies inside this process, if its devices of the destination
        receive nothing from outside; else None."""
        make_put, (array, pieces, *_), take = fast_put(), leg, self._take
        if len(pieces) < len(self.destination.local_devices):
            return None
        put = make_put(self.received_shape, self.dtype, self.destination_sharding)

        return lambda arrays: [put(take(arrays[array], pieces))]

    def _take(self, array: jax.Array, places: tuple[int, ...]) -> Arrays:
        """Takes these shards of an array."""
        if places == (0,):
            return [self._first(array)]
        shards = self._shards(array)
        return [shards[place] for place in places]

    def _put_together(self, arrived: Arrays) -> Arrays:
        """Assembles the receiver's arrays from the copies' shards and padding."""
        assert self._fill is not None
        shards = [self._shards(array) for array in arrived]
        return [
            self._assemble(
                [
                    shards[shard[0]][shard[1]] if isinstance(shard, tuple) else shard
                    for shard in order
                ]
            )
            for order in self._fill
        ]


Shard = tuple[int, int] | jax.Array
"""Shard of a local device: a leg and the place among the shards that it brought to this process; or
padding where no piece lands."""


def _fill_orders(
    placed: list[list[jax.Device]],
    arrays: list[list[int]],
    destination: list[jax.Device],
    piece: tuple[int, int],
    dtype: jnp.dtype,
) -> list[list[Shard]]:
    """Lists the local shards of each of the receiver's arrays, in order, given the devices that
    each copy reaches (`placed`) and the copies that fill each array."""
    here = jax.process_index()
    mine = [[device for device in leg if device.process_index == here] for leg in placed]
    orders: list[list[Shard]] = []
    for legs in arrays:
        found = {device: (leg, place) for leg in legs for place, device in enumerate(mine[leg])}
        orders.append(
            [
                found.get(device) or jax.device_put(np.zeros(piece, dtype), device)
                for device in destination
                if device.process_index == here
            ]
        )
    return orders


def _copies(
    senders: list[jax.Device], receivers: list[jax.Device]
) -> Iterator[list[tuple[jax.Device, jax.Device]]]:
    """Divides pairs of devices into copies that JAX supports: one copy if each process has pairs
    with at most one other process, else one for each pair of processes. Copies inside of several
    processes are never joined."""
    pairs = list(zip(senders, receivers, strict=True))
    processes = {(sender.process_index, receiver.process_index) for sender, receiver in pairs}
    inside = len(processes) > 1 and any(a == b for a, b in processes)
    if not inside and len({a for a, _ in processes}) == len({b for _, b in processes}) == len(
        processes
    ):
        yield pairs
        return

    def ends(pair: tuple[jax.Device, jax.Device]) -> tuple[int, int]:
        return pair[0].process_index, pair[1].process_index

    for _, of_two in groupby(sorted(pairs, key=ends), key=ends):
        yield list(of_two)


def _line(devices: list[jax.Device]) -> NamedSharding:
    """Sharding with one piece on each of these devices, in this order."""
    return piece_sharding(Mesh(np.array(devices), ("pieces",)))


OPENS = DevicePutTransport
