"""Sends the messages of the leader to all followers, over a tree of TCP connections.

`leader.py` sends into it; `follower.py` receives (`subscription.py`) and hands each message on at
once. A send is a system call a connection, on the caller's thread: a gRPC stream of Python takes
six to twelve times the CPU (2026-11-22). Handshake and frames are those of
`link/session/channel.py`. No process is asked again or reconnects: a lost one is missed on its
stream. Knows nothing of the meaning of messages.
"""

import select
import socket
import threading
from collections import deque

from jaxserve.fleet.listening import listening_socket
from jaxserve.link.session.channel import Channel, Framing
from jaxserve.link.session.listener import Listener, shut

LOOK_SECONDS = 0.5
"""How often a subscriber to whom nothing comes looks at the time."""
_HELLO_SECONDS = 10.0
MOST_HELLOS = 64
"""Subscribers that are being taken at a time."""
MESSAGE_BYTES = 256 << 20
"""Cap of a message; a plan takes kilobytes."""


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


def _send(connection: socket.socket, frame: memoryview) -> memoryview:
    """Returns what there was no room for; nothing where the connection has ended."""
    try:
        return frame[connection.send(frame) :]
    except BlockingIOError:
        return frame
    except OSError:
        return frame[len(frame) :]
