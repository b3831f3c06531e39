"""Where a message from another runtime lands on the ffn mesh, and how its answer leaves.

The pieces arrive one array each, on their ingress devices; programs take one array a slot over the
whole mesh, in which devices without a piece hold padding. Inside one runtime the transports do the
same (`link/transports/device_put.py`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxserve.link.dispatch.copy import fast_shards
from jaxserve.link.dispatch.ends import Arrays, piece_sharding
from jaxserve.link.dispatch.route import Route


class Landing:
    """Of one ffn mesh, for messages of any size."""

    def __init__(self, route: Route, mesh: Mesh):
        self._route = route
        self._sharding = piece_sharding(mesh)
        devices = list(mesh.devices.flat)
        self._places = [route.ingress(piece) for piece in range(route.attention)]
        self._pieces = {place: piece for piece, place in enumerate(self._places)}
        self._devices = devices
        self._padding: dict[tuple[tuple[int, int], jnp.dtype], list[jax.Array]] = {}

    def shapes(self, piece: tuple[int, int], dtype: jnp.dtype) -> list[jax.ShapeDtypeStruct]:
        """As what a message's pieces [rows, words] land, one array a piece."""
        return [
            jax.ShapeDtypeStruct(piece, dtype, sharding=SingleDeviceSharding(self._devices[device]))
            for device, _ in self._places
        ]

    def assemble(self, pieces: Sequence[jax.Array]) -> Arrays:
        """The message as programs take it, of its pieces."""
        rows, words = pieces[0].shape
        dtype = pieces[0].dtype
        _, make_assemble = fast_shards()
        padding = self._padding_of((rows, words), dtype)
        shape = len(self._devices) * rows, words
        slots = []
        for slot in range(self._route.slots):
            places = [self._pieces.get((device, slot)) for device in range(len(self._devices))]
            shards = [
                padding[device] if piece is None else pieces[piece]
                for device, piece in enumerate(places)
            ]
            slots.append(make_assemble(shape, dtype, self._sharding)(shards))
        return slots

    def pieces(self, slots: Arrays) -> list[jax.Array]:
        """The answer's pieces, of what a program returned."""
        shards_of, _ = fast_shards()
        shards = [shards_of(array) for array in slots]
        return [shards[slot][device] for device, slot in self._places]

    def _padding_of(self, piece: tuple[int, int], dtype: jnp.dtype) -> list[jax.Array]:
        """A piece of zeros on every device, made once."""
        known = self._padding.get((piece, dtype))
        if known is None:
            known = [jax.device_put(np.zeros(piece, dtype), device) for device in self._devices]
            self._padding[piece, dtype] = known
        return known
