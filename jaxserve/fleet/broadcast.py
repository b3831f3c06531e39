"""Messages of the leader to all followers, handed on over a tree of TCP connections.

`leader.py` sends into it, `follower.py` receives from it and hands on at once what it receives. A
send is a system call a connection, on the caller's thread: a gRPC stream of Python takes six to
twelve times the CPU (2026-11-22). Handshake and frames are those of
`link/session/channel.py`. No process is asked again or reconnects: a lost one is missed on its
stream. Knows nothing of the meaning of messages.
"""

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from jaxserve.fleet.listening import listening_socket
from jaxserve.link.session.channel import (
    AuthenticationError,
    Channel,
    Framing,
    dial,
)
from jaxserve.link.session.listener import Listener, shut

HOSTS_EACH = 8
"""Hosts to which one process hands a message on."""
LOOK_SECONDS = 0.5
"""How often a subscriber to whom nothing comes looks at the time."""
_HELLO_SECONDS = 10.0
MOST_HELLOS = 64
"""Subscribers that are being taken at a time."""
_MESSAGE_BYTES = 256 << 20
"""Cap of a message; a plan takes kilobytes."""


def parent_of(host: str, leader: str, followers: Sequence[str]) -> int | None:
    """Returns the number of the follower that hands on to the next one; None: the leader does.

    The first process of a host gets everything, and hands it on to the others there. The hosts are
    a tree below the leader's, each with at most `HOSTS_EACH` below it, so that no process has more
    to send when more hosts join.

    Args:
      host: of the one that joins.
      leader: its host.
      followers: hosts of those that have joined, in that order.
    """
    if host == leader:
        return None
    if host in followers:
        return followers.index(host)
    hosts = [each for each in dict.fromkeys(followers) if each != leader]
    above = len(hosts) // HOSTS_EACH
    return followers.index(hosts[above - 1]) if above else None


class Broadcaster:
    """The sending end, for all that are below this process.

    Args:
      token: the secret that they must know.
    """

    def __init__(self, token: str):
        self._lock = threading.Lock()
        self._closed = False
        self._listener = Listener(
            "broadcast", token, self._admit, most=MOST_HELLOS, seconds=_HELLO_SECONDS
        )
        self._below: list[_Subscriber] = []

    def listen(self, host: str) -> int:
        """Takes subscribers from now on; returns the port.

        Raises:
          OSError: the host is none of this machine's.
        """
        listening = listening_socket(host)
        self._listener.start(listening)
        return int(listening.getsockname()[1])

    def send(self, message: bytes) -> None:
        """Sends to all; waits for nobody."""
        with self._lock:
            for subscriber in self._below:
                frame = memoryview(subscriber.framing.pack(message))
                if subscriber.waiting:
                    subscriber.waiting.append(frame)
                elif rest := _send(subscriber.connection, frame):
                    subscriber.waiting.append(rest)
                    behind = (subscriber,)
                    threading.Thread(target=self._catch_up, args=behind, daemon=True).start()

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        with self._lock:
            self._closed = True
            below, self._below = self._below, []
        self._listener.close(LOOK_SECONDS)
        for subscriber in below:
            shut(subscriber.connection)
            subscriber.connection.close()

    def _admit(self, channel: Channel) -> None:
        """Takes a subscriber, and says so by an empty message."""
        connection, framing, _ = channel.detach()
        connection.setblocking(False)
        with self._lock:
            if self._closed:
                connection.close()
                return
            _send(connection, memoryview(framing.pack(b"")))
            self._below.append(_Subscriber(connection, framing))

    def _catch_up(self, subscriber: "_Subscriber") -> None:
        """Sends what waits for room, until nothing does."""
        room, waiting = select.poll(), subscriber.waiting
        room.register(subscriber.connection, select.POLLOUT)
        while True:
            room.poll(LOOK_SECONDS * 1000)
            with self._lock:
                while not self._closed and waiting:
                    if rest := _send(subscriber.connection, waiting[0]):
                        waiting[0] = rest
                        break
                    waiting.popleft()
                if self._closed or not waiting:
                    return


class _Subscriber:
    """One process directly below this one."""

    def __init__(self, connection: socket.socket, framing: Framing):
        self.connection, self.framing = connection, framing
        self.waiting: deque[memoryview] = deque()
        """Frames for which the connection's buffer has no room."""


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
            self._channel = dial(address, token, timeout, _MESSAGE_BYTES)
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


def _send(connection: socket.socket, frame: memoryview) -> memoryview:
    """Returns what there was no room for; nothing where the connection has ended."""
    try:
        return frame[connection.send(frame) :]
    except BlockingIOError:
        return frame
    except OSError:
        return frame[len(frame) :]
