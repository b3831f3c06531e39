"""The two ends of a link that workers use, and the layout of a message on their meshes.

The link inside a runtime has both ends (`runtime_link.py`). Between runtimes an attention worker
has its end over `link/remote/client.py`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.mesh import cached_sharding

Arrays = Sequence[jax.Array]
SendMessage = Callable[[jax.Array], object]
"""Sends a message."""
ReceiveAnswer = Callable[[], Arrays]
"""Returns the answer to the oldest unanswered message, one array for each ffn instance."""


class AttentionEnd(Protocol):
    """End of a link at which an attention worker sends messages and receives answers."""

    def sender(self, layer: int, tokens: int, lane: int) -> SendMessage:
        """Makes the sender for a layer's messages in steps of this number of tokens a DP group."""

    def receiver(self, layer: int, tokens: int, lane: int) -> ReceiveAnswer:
        """Makes the receiver of the answers to them."""


class FFNEnd(Protocol):
    """End at which an ffn worker of the same runtime receives messages and sends answers."""

    def receiver(self, layer: int, tokens: int) -> Callable[[], Arrays]:
        """Makes the receiver of a layer's messages, one array for each slot."""

    def sender(self, tokens: int) -> Callable[..., object]:
        """Makes the sender of answers, which takes their arrays."""


def piece_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding with one piece of rows on every device of the mesh, in mesh order."""
    return cached_sharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
