"""The two ends of a link as workers know them, and how a message lies on their meshes.

The link inside a runtime has both (`runtime_link.py`); between runtimes an attention worker has its
end over `link/remote/client.py`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.mesh import cached_sharding

Arrays = Sequence[jax.Array]
SendMessage = Callable[[jax.Array], object]
"""Takes a message."""
ReceiveAnswer = Callable[[], Arrays]
"""Returns the answer to the oldest message without one: an array an instance of the ffn mesh."""


class AttentionEnd(Protocol):
    """Where an attention worker sends messages and receives answers."""

    def sender(self, layer: int, tokens: int, lane: int) -> SendMessage:
        """For messages of a layer, in a lane's steps of so many tokens a DP group."""
        ...

    def receiver(self, layer: int, tokens: int, lane: int) -> ReceiveAnswer:
        """For the answers to them."""
        ...


class FFNEnd(Protocol):
    """Where an ffn worker of the same runtime receives messages and sends answers."""

    def receiver(self, layer: int, tokens: int) -> Callable[[], Arrays]:
        """For messages of a layer, one array a slot."""
        ...

    def sender(self, tokens: int) -> Callable[..., object]:
        """For the answers, whose arrays it takes."""
        ...


def piece_sharding(mesh: Mesh) -> NamedSharding:
    """One piece of rows on every device of the mesh, in mesh order."""
    return cached_sharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
