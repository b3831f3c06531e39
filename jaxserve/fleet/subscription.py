"""The receiving end of the leader's broadcast (`broadcast.py`).

Called by `follower.py`, which decodes the messages.
"""

import contextlib
from collections.abc import Iterator

from jaxserve.fleet.broadcast import LOOK_SECONDS, MESSAGE_BYTES
from jaxserve.link.session.channel import AuthenticationError, dial


class Subscription:
    """The receiving end.

    Args:
      address: `host:port` of a `Broadcaster`.
      token: as it has.
      timeout: seconds to get there.

    Raises:
      OSError: nobody listens there, or it does not take this process.
    """

    def __init__(self, address: str, token: str, timeout: float):
        try:
            self._channel = dial(address, token, timeout, MESSAGE_BYTES)
            with contextlib.ExitStack() as stack:
                stack.callback(self._channel.close)
                if not self._channel.wait(timeout) or self._channel.receive():
                    raise OSError("another protocol")
                stack.pop_all()
        except (AuthenticationError, OSError, EOFError) as error:
            raise OSError(f"{error}" or "it closed the connection") from error

    def messages(self) -> Iterator[bytes | None]:
        """Yields messages in order, None where none came for `LOOK_SECONDS`, until the connection
        ends."""
        try:
            while True:
                yield self._channel.receive() if self._channel.wait(LOOK_SECONDS) else None
        except (EOFError, OSError):
            return
        finally:
            self._channel.close()

    def close(self) -> None:
        """Ends `messages`, from any thread."""
        self._channel.shutdown()
