"""One end of the array side of a `pull` connection: a transfer server and the way to the peer's.

`jax.experimental.transfer` behind five calls. Every connection has a server of its own at both
ends: a server whose pullers die in the middle of transfers stops sending after some 30 deaths,
without an error. Used by `link/remote/connection.py` and `link/remote/server.py`; knows nothing of
messages.
"""

import contextlib
import secrets
from collections.abc import Sequence

import jax
from jax.experimental import transfer

from jaxserve.errors import ConfigError
from jaxserve.link.session.channel import join_address
from jaxserve.ports import free_port

PROBE_BYTES = 4096
"""Size of the array that shows whether a transfer works, there and back."""
SOCKETS = 1
"""Data sockets a connection. More help arrays of hundreds of megabytes; a message of 64 KB to 2 MB
goes there and back faster over one."""
PARALLEL_COPIES = 4
TRANSFER_BYTES = 4 << 20
"""Chunk of one copy. The server pins chunks × copies of it: the default would be 2 GiB."""


class Transfers:
    """Registers arrays for the peer to pull, and pulls the peer's.

    Args:
      device: one of the worker's; its runtime moves the arrays.
      host: address of this host as the peer reaches it.
      sockets: data sockets of the connection.
    """

    def __init__(self, device: jax.Device, host: str, sockets: int = SOCKETS):
        self._server = transfer.start_transfer_server(
            device.client,
            join_address(host, free_port(host)),
            [join_address(host, 0)] * sockets,  # each connection is bound to one of these
            max_num_parallel_copies=PARALLEL_COPIES,
            transfer_size=TRANSFER_BYTES,
        )
        self._peer: transfer.TransferConnection | None = None
        self.address: str = self._server.address()

    def connect(self, address: str) -> None:
        """Names the peer's server; before the first pull."""
        self._peer = self._server.connect(address)

    def register(self, uuid: int, arrays: Sequence[jax.Array]) -> None:
        """Lets the peer pull the buffers of the arrays, computed or not, once, in this order."""
        self._server.await_pull(uuid, arrays)

    def pull(self, uuid: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Asks for what the peer registers under `uuid`, now or later; returns at once.

        Args:
          shapes: with shardings. Their buffers, in order, must have the sizes of the registered
            ones; how they are grouped into arrays and on which devices they land is free. A wrong
            dtype of equal size is not noticed by anybody.

        Returns:
          arrays that become ready with the data, or as errors.
        """
        assert self._peer is not None
        return self._peer.pull(uuid, shapes)

    def cancel(self) -> None:
        """Turns unfinished pulls into errors, at once, and forgets what nobody has pulled."""
        with contextlib.suppress(RuntimeError):
            if self._peer is not None:
                self._peer._poison_connection()  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            self._server._reset_rendevous_table()


def is_ready(array: jax.Array) -> bool:
    """Whether the array is computed or has arrived, perhaps as an error."""
    return array.is_ready()  # type: ignore[attr-defined]


def new_uuid() -> int:
    """63 random bits: whoever can reach a transfer server could pull what it can name."""
    return secrets.randbits(63)


def refuse_several_processes(link: str = "link.transport pull") -> None:
    """Raises ConfigError in a runtime of several processes: one process a worker, for now."""
    if jax.process_count() > 1:
        raise ConfigError(f"{link}: this worker has {jax.process_count()} processes, expected 1")
