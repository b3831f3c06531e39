"""One direction of a link inside one JAX runtime, with its two ends.

The worker that sends arrays calls the sender, and the worker that takes them in calls the receiver,
in the same order; each call enqueues and returns at once. A process that plays both roles has both
ends, and its messages wait here to be received. A process that plays one role calls one end. JAX
pairs transfers between processes by their order, so each end takes part in all copies of a message,
including those between other processes. `link/remote/client.py` joins independent runtimes.
"""

import abc
import functools
from collections import deque
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.link.dispatch.ends import Arrays, piece_sharding
from jaxserve.link.dispatch.route import Route

Direction = Literal["dispatch", "combine"]


class MeshTransport(abc.ABC):
    """Moves messages of one shape in one direction.

    On the attention mesh a message is one array with a piece on each device, and an answer is
    `route.instances` such arrays. On the ffn mesh both are `route.slots` such arrays, one for each
    slot; devices without a piece hold padding of any value.

    Args:
      direction: `dispatch` goes from attention to ffn, `combine` back.
      attention, ffn: both meshes.
      piece: rows and width of a piece.
    """

    def __init__(
        self,
        direction: Direction,
        route: Route,
        attention: Mesh,
        ffn: Mesh,
        piece: tuple[int, int],
        dtype: jnp.dtype,
    ):
        self.direction, self.route = direction, route
        self.piece, self.dtype = piece, dtype
        self.attention_devices = list(attention.devices.flat)
        self.ffn_devices = list(ffn.devices.flat)
        self.source, self.destination = (
            (attention, ffn) if direction == "dispatch" else (ffn, attention)
        )
        self.source_sharding = piece_sharding(self.source)
        self.destination_sharding = piece_sharding(self.destination)
        here = jax.process_index()
        self._sends_here = any(d.process_index == here for d in self.source.devices.flat)
        self._receives_here = any(d.process_index == here for d in self.destination.devices.flat)
        self._on_the_way: deque[Arrays] = deque()
        self.prepare()

    @abc.abstractmethod
    def prepare(self) -> None:
        """Looks up and compiles everything that stays the same for all messages."""

    @property
    def received_shape(self) -> tuple[int, int]:
        """Shape of one array on the destination."""
        return self.destination.size * self.piece[0], self.piece[1]

    def sender(self) -> Callable[..., object]:
        """Makes the sending end. It takes the whole message on the source mesh, one array or one
        for each slot, and enqueues its copies."""
        copy, put = self.copier(), self._on_the_way.append
        if self._receives_here:
            return lambda *arrays: put(copy(arrays))
        return lambda *arrays: copy(arrays)

    def receiver(self) -> Callable[[], Arrays]:
        """Makes the receiving end. It returns the oldest message that was not received yet, on the
        destination mesh, still being copied."""
        if self._sends_here:
            return self._on_the_way.popleft
        copy, nothing = self.copier(), self._nothing()
        return lambda: copy(nothing)

    def clear(self) -> None:
        """Forgets messages that are on the way."""
        self._on_the_way.clear()

    @abc.abstractmethod
    def copier(self) -> Callable[[Arrays], Arrays]:
        """Makes the call that takes this process's part in a message's copies."""

    def _nothing(self) -> Arrays:
        """Stands in for the message in a process without source devices."""
        count = 1 if self.direction == "dispatch" else self.route.slots
        shape = (self.source.size * self.piece[0], self.piece[1])
        return [absent(shape, self.source_sharding, self.dtype)] * count


@functools.lru_cache(maxsize=1024)
def absent(shape: tuple[int, ...], sharding: jax.sharding.Sharding, dtype: jnp.dtype) -> jax.Array:
    """Makes an array without shards in this process, for copies between other processes."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
