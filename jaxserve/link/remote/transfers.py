"""What a transport between runtimes does for a connection: rows cross behind its frames.

`connection.py` and `server.py` call it. A transport is one file in `link/transports/`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.link.session.messages import Bulk


class ArrayTransfers(Protocol):
    """One end of the array side of a connection, made of its channel. One thread sends, another
    one receives."""

    def send(self, frame: Callable[[Bulk], bytes], arrays: Sequence[jax.Array]) -> object:
        """Sends arrays with one buffer each behind the frame that announces them, once they are
        computed.

        Raises:
          RuntimeError: an array could not be computed.
          OSError: the connection is gone.
        """
        ...

    def receive(self, bulk: Bulk, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
        """Returns arrays of these shapes that follow a received frame.

        Raises:
          OSError, EOFError: other arrays follow, or the connection is gone.
        """
        ...


def refuse_several_processes(link: str) -> None:
    """Raises ConfigError in a runtime of several processes: one process a worker, for now."""
    if jax.process_count() > 1:
        raise ConfigError(f"{link}: this worker has {jax.process_count()} processes, expected 1")
