"""What a transport between runtimes does for a connection: arrays cross under the numbers of notes.

`connection.py` and `server.py` call it. A transport is one file in `link/transports/`.
"""

import secrets
from collections.abc import Sequence
from typing import Protocol

import jax

from jaxserve.errors import ConfigError

PROBE_BYTES = 4096
"""Size of the array that shows whether a transfer works, there and back."""


class ArrayTransfers(Protocol):
    """One end of the array side of a connection, made of a device of the worker, whose runtime
    moves the arrays, and the address of this host as the peer reaches it."""

    address: str
    """Address of this end, which the peer is told."""

    def connect(self, address: str) -> None:
        """Names the peer's end; before the first pull."""

    def register(self, uuid: int, arrays: Sequence[jax.Array]) -> None:
        """Lets the peer pull the buffers of the arrays, computed or not, once, in this order."""

    def pull(self, uuid: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Asks for the arrays that the peer registers under `uuid`, now or later; returns at once.

        Args:
          shapes: with shardings. Their buffers, in order, must have the sizes of the registered
            ones; how they are grouped into arrays and on which devices they land is free. Nothing
            notices a wrong dtype of equal size.

        Returns:
          arrays that become ready with the data, or as errors.
        """
        ...

    def cancel(self) -> None:
        """Turns unfinished pulls into errors, at once, and forgets arrays that were not pulled."""


def is_ready(array: jax.Array) -> bool:
    """Returns whether the array is computed or has arrived, perhaps as an error."""
    return array.is_ready()  # type: ignore[attr-defined]


def new_uuid() -> int:
    """63 random bits: a stranger that reaches a transfer server could pull what it can name."""
    return secrets.randbits(63)


def refuse_several_processes(link: str) -> None:
    """Raises ConfigError in a runtime of several processes: one process a worker, for now."""
    if jax.process_count() > 1:
        raise ConfigError(f"{link}: this worker has {jax.process_count()} processes, expected 1")
