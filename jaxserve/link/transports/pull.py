"""Rows between runtimes as bytes behind the frames of the connection that announces them.

A message may leave out rows that its receiver does not need. The answer then leaves out the same
rows. The frame names the rows that follow; the receiver fills in the others.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxserve.config.topology import Transport
from jaxserve.link.bulk import HostBuffers, bulk_bytes, on_host, received_arrays, send_arrays
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

    def send(
        self,
        frame: Callable[[Bulk], bytes],
        arrays: Sequence[jax.Array],
        rows: Sequence[bytes] = (),
    ) -> None:
        """Sends arrays with one buffer each behind the frame that announces them, once they are
        computed; raises as `on_host` and `send_arrays`.

        Args:
          rows: rows to send of each array, a bit each; none: all rows of all arrays.
        """
        sent = on_host(arrays)
        if rows:
            sent = [one[mask_of(bits, len(one))] for one, bits in zip(sent, rows, strict=True)]
        send_arrays(self._channel, frame, sent, rows=tuple(rows))

    def receive(
        self, bulk: Bulk, shapes: Sequence[jax.ShapeDtypeStruct], padding: np.ndarray | int = 0
    ) -> list[np.ndarray]:
        """Returns arrays of these shapes that follow a received frame, in host memory.

        Args:
          padding: what rows hold that do not follow.

        Raises:
          OSError, EOFError: other arrays follow, or the connection is gone.
        """
        masks = [mask_of(bits, one.shape[0]) for bits, one in zip(bulk.rows, shapes, strict=False)]
        came = [
            jax.ShapeDtypeStruct((int(mask.sum()), *one.shape[1:]), one.dtype)
            for mask, one in zip(masks, shapes, strict=False)
        ] or shapes
        if bulk.size != bulk_bytes(came):
            raise OSError(f"{bulk.size} bytes of rows, expected {bulk_bytes(came)}")
        # Buffers of one size for all numbers of rows, so that they are reused.
        buffer = self._buffers.take(bulk_bytes(shapes))
        self._channel.receive_into(memoryview(buffer)[: bulk.size], SECONDS)
        parts = received_arrays(buffer, bulk, came)
        if not masks:
            return parts
        whole = received_arrays(self._buffers.take(len(buffer)), Bulk(0, None), shapes)
        for array, mask, part in zip(whole, masks, parts, strict=True):
            array[mask], array[~mask] = part, padding
        return whole


def mask_of(bits: bytes, rows: int) -> np.ndarray:
    """Returns for each row whether its bit is set."""
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=rows).view(bool)


OPENS = PullTransfers
