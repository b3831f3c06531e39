"""Rows between runtimes as bytes behind the frames of the connection that announces them."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxserve.config.topology import Transport
from jaxserve.link.bulk import HostBuffers, bulk_bytes, received_arrays, send_arrays
from jaxserve.link.session.channel import Channel
from jaxserve.link.session.messages import Bulk

# Measured into one process, from another one of the same machine by four sockets, on two cores.
TRANSPORT = Transport(crosses_runtimes=True, gb_per_second=2.5)
SECONDS = 30.0
"""Longest wait for the last byte of a message whose first one has come."""

SMALL_BYTES = 1 << 18
"""Most bytes of arrays that a thread sends itself, though it has other work to do."""


class PullTransfers:
    """The arrays of one connection. Any thread may send, and one at a time receives. Another fabric
    between runtimes is another class with these calls."""

    def __init__(self, channel: Channel):
        self._channel, self._buffers = channel, HostBuffers()

    def at_once(self, arrays: Sequence[jax.Array]) -> bool:
        """Returns whether to send these arrays on the thread at hand: they are small and computed,
        and sending them takes less time than waking another thread."""
        computed = all(one.is_deleted() or one.is_ready() for one in arrays)  # type: ignore[attr-defined]
        return computed and sum(array.nbytes for array in arrays) <= SMALL_BYTES

    def send(self, frame: Callable[[Bulk], bytes], arrays: Sequence[jax.Array]) -> None:
        """Sends arrays with one buffer each behind the frame that announces them, once they are
        computed; raises as `send_arrays`."""
        send_arrays(self._channel, frame, arrays)

    def receive(self, bulk: Bulk, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
        """Returns arrays of these shapes that follow a received frame, in host memory.

        Raises:
          OSError, EOFError: other arrays follow, or the connection is gone.
        """
        if bulk.size != bulk_bytes(shapes):
            raise OSError(f"{bulk.size} bytes of rows, expected {bulk_bytes(shapes)}")
        buffer = self._buffers.receive(self._channel, bulk.size, SECONDS)
        return received_arrays(buffer, bulk, shapes)


OPENS = PullTransfers
