"""Transfers of arrays between runtimes by `jax.experimental.transfer`, which pulls them.

Every connection has a server of its own at both ends: a server whose pullers die in the middle of
transfers stops sending after some 30 deaths, without an error.
"""

import contextlib
from collections.abc import Sequence

import jax
from jax.experimental import transfer

from jaxserve.config.topology import Transport
from jaxserve.link.session.channel import join_address
from jaxserve.ports import free_port

TRANSPORT = Transport(crosses_runtimes=True)
SOCKETS = 1
"""Data sockets a connection. More help arrays of hundreds of megabytes; a message of 64 KB to 2 MB
goes there and back faster over one."""
PARALLEL_COPIES = 4
TRANSFER_BYTES = 4 << 20
"""Chunk of one copy. The server pins chunks × copies of it: the default would be 2 GiB."""


class PullTransfers:
    """A transfer server and the way to the peer's; see `link/remote/transfers.py`.

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
        self._peer = self._server.connect(address)

    def register(self, uuid: int, arrays: Sequence[jax.Array]) -> None:
        self._server.await_pull(uuid, arrays)

    def pull(self, uuid: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        assert self._peer is not None
        return self._peer.pull(uuid, shapes)

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self._peer is not None:
                self._peer._poison_connection()  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            self._server._reset_rendevous_table()


OPENS = PullTransfers
