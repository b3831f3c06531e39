"""Channel of a session: authenticated frames of bytes over TCP.

The two ends prove to each other that they know the token (HMAC challenges of
`multiprocessing.connection`; nothing is pickled), then exchange frames. Every frame carries its
number on the connection and a checksum, so that a changed, lost or repeated frame ends the
connection and never passes for another one. Chosen over a gRPC stream by latency: a frame of 120
bytes and its echo take 45 µs, over gRPC 295 (2 cores of a Xeon at 2.0 GHz, loopback, 2026-11-22),
and a note goes out for every layer and lane. The token keeps strangers out; only with `cluster.tls`
(`tls.py`) is anything encrypted. Knows nothing of JAX.
"""

import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError as AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec

from jaxserve.errors import ConfigError

MAX_FRAME_BYTES = 1 << 20
"""Cap of one frame: a note takes a hundred bytes, a hello a few kilobytes."""
SEND_SECONDS = 2
"""A peer that reads nothing for this long, with its buffers full, has lost the connection."""
MOST_PARTS = 64
"""Parts that go out together with their frame; the system takes 1,024 at most."""
TICK_SECONDS = 0.1
"""Wait of a channel's reader before it looks at its deadlines."""
LOOK_SECONDS = 0.4
"""Seconds between two looks at a peer that reads no posted bytes."""
READ_BYTES = 1 << 16
"""Most bytes that are read ahead: a frame, and small rows behind it, come in one call."""
LONGEST_TICK_SECONDS = 0.5
"""Most that a tick counts for: a process that was stopped has not waited (`AwakeClock`)."""
RECEIVE_SECONDS = 5
"""A frame that stops in the middle for this long is the end of the connection, too."""

_NUMBERED = struct.Struct("!II")
_HEAD_BYTES = 12
"""Bytes of the body and number of the frame, and the checksum."""


def in_clear(sock: socket.socket, *, accepted: bool) -> socket.socket:
    """Returns the socket itself."""
    return sock


secured = in_clear
"""Returns the socket that a channel goes on with. `tls.use` puts its own function here."""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines of a link's waits, in seconds in which this process can run.

    Attributes:
      handshake: from the TCP connection to the first probe's return.
      probe: between two probes.
      suspect: of silence, after which a standby takes over if there is one.
      down: of silence, after which the connection is given up in any case.
      answer: from a message being computed to its answer; includes the peer's compilation.
      absent: wait of an attention worker without any ffn worker before it fails.
    """

    handshake: float = 5.0
    probe: float = 0.5
    suspect: float = 1.5
    down: float = 5.0
    answer: float = 30.0
    absent: float = 60.0


DEFAULT_DEADLINES = Deadlines()


class Framing:
    """Makes and checks the frames of one connection, each way numbered from 0.

    A frame is a head (bytes of the body, number, CRC-32 of both and of the body) and the body.
    Frames must be packed and unpacked in the order in which they are sent and received.

    Args:
      most: Largest body that is received, in bytes.
    """

    def __init__(self, most: int = MAX_FRAME_BYTES):
        self._most = most
        self._sent = self._received = 0

    def pack(self, body: bytes) -> bytes:
        """Returns the next frame to send."""
        self._sent += 1
        return _head(body, self._sent - 1) + body

    def next(self, received: bytearray) -> bytes | None:
        """Takes a frame off the front of the received bytes and returns its body; None if it has
        not come whole.

        Raises:
          EOFError: the frame is larger than the cap; said before its body has come.
          OSError: it is not the one that was sent.
        """
        if len(received) < _HEAD_BYTES:
            return None
        length = _NUMBERED.unpack_from(received)[0]
        if length > self._most:
            raise EOFError(f"a frame of {length} bytes where {self._most} are the most")
        if len(received) < (end := _HEAD_BYTES + length):
            return None
        body = bytes(received[_HEAD_BYTES:end])
        if received[:_HEAD_BYTES] != _head(body, self._received):
            raise OSError(
                f"frame {self._received} was changed, lost or repeated, or is of another version"
            )
        self._received += 1
        del received[:end]
        return body


def _head(body: bytes, number: int) -> bytes:
    begin = _NUMBERED.pack(len(body), number & 0xFFFFFFFF)
    return begin + zlib.crc32(body, zlib.crc32(begin)).to_bytes(4)


@contextlib.contextmanager
def closed_on_error(end: "socket.socket | Channel") -> Iterator[None]:
    """Closes a connection that the body could not prepare."""
    try:
        yield
    except BaseException:
        end.close()
        raise


class Channel:
    """Frames to and from one peer. Any thread may send; one thread receives and closes.

    Args:
      sock: Connected, of TCP or a Unix pair; the channel's from now on.
      most: Largest frame that is received, in bytes.
      accepted: Whether this is the listening end, for `cluster.tls`; None: no TLS in any case.

    Raises:
      OSError: the peer has left already, or does not pass for TLS.
    """

    def __init__(
        self, sock: socket.socket, most: int = MAX_FRAME_BYTES, *, accepted: bool | None = None
    ):
        with closed_on_error(sock):
            self.peer = "this host"
            """The peer's address."""
            if sock.family != socket.AF_UNIX:
                # Notes follow each other unanswered: Nagle's algorithm would hold the second back.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.peer = join_address(*sock.getpeername()[:2])
            self._socket = sock if accepted is None else secured(sock, accepted=accepted)
            self._socket.setblocking(True)
            self.allow(SEND_SECONDS, RECEIVE_SECONDS)
        self._framing = Framing(most)
        self._sending = threading.Lock()
        self.unread = bytearray()
        """Bytes that have been received and not taken yet."""
        self.unsent = bytearray()
        """Bytes of posted frames for which there is no room yet."""
        self.descriptor = self._socket.fileno()
        """Descriptor that is readable once bytes have come."""
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def allow(self, send: float, receive: float) -> None:
        """Sets the seconds that the peer may read nothing, and stop in the middle of a frame."""
        for option, seconds in {socket.SO_SNDTIMEO: send, socket.SO_RCVTIMEO: receive}.items():
            value = struct.pack("ll", math.ceil(seconds), 0)
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def send(self, frame: bytes, parts: Sequence[memoryview] = ()) -> None:
        """Sends a frame and, right behind it, the bytes that it announces.

        Raises:
          OSError: the connection is gone.
        """
        with self._sending:
            head = self._framing.pack(frame)
            if not parts:
                return self._socket.sendall(head)
            whole = [memoryview(head), *parts]
            # Plain bytes go in one call, or the other end would wake up twice.
            together = all(part.format == "B" and part.ndim == 1 for part in whole)
            sent = self._socket.sendmsg(whole[:MOST_PARTS]) if together else 0
            for part in whole:
                if sent < part.nbytes:
                    self._socket.sendall(part[sent:] if sent else part)
                sent = max(0, sent - part.nbytes)

    def post(self, frame: bytes) -> None:
        """Sends a frame without waiting. If the peer reads slowly, another thread sends the rest
        and later frames once there is room. A channel that posts does not `send` any more. Raises
        OSError when the connection is gone."""
        with self._sending:
            waited, whole = bool(self.unsent), self._framing.pack(frame)
            try:
                sent = 0 if waited else self._socket.send(whole, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            self.unsent += whole[sent:]
            if self.unsent and not waited:
                threading.Thread(target=self._catch_up, name="catch up", daemon=True).start()

    def _catch_up(self) -> None:
        """Sends what waits for room, until nothing does or the connection has ended."""
        room = select.poll()
        # It may have been closed meanwhile (a ValueError); the thread that reads says why.
        with contextlib.suppress(OSError, ValueError):
            room.register(self.descriptor, select.POLLOUT)
            while self.unsent:
                room.poll(LOOK_SECONDS * 1000)
                with self._sending, contextlib.suppress(BlockingIOError):
                    while self.unsent:
                        del self.unsent[: self._socket.send(self.unsent, socket.MSG_DONTWAIT)]

    def wait(self, seconds: float | None = -1.0) -> bool:
        """Waits for the next frame and returns whether it has begun to come.

        Args:
          seconds: longest wait; negative: as long as the connection lasts; None: bytes have come.

        Raises:
          EOFError, OSError: the connection is gone.
        """
        if not self.unread and (seconds is None or self._poll.poll(seconds * 1000)):
            with contextlib.suppress(BlockingIOError):  # another thread has read them
                self._read(socket.MSG_DONTWAIT)
        return bool(self.unread)

    def receive(self) -> bytes:
        """Returns the body of the next frame; waits for it as long as the connection lasts.

        Raises:
          EOFError, OSError: the connection is gone, or the frame is not the one that was sent.
        """
        self.wait()
        while (frame := self._framing.next(self.unread)) is None:
            self._read()
        return frame

    def take(self) -> list[bytes]:
        """Returns the bodies of all frames that have come whole, without waiting; raises as
        `receive`. Called again whenever the descriptor is readable."""
        with contextlib.suppress(BlockingIOError):
            self._read(socket.MSG_DONTWAIT)
        return list(iter(lambda: self._framing.next(self.unread), None))

    def receive_into(self, buffer: memoryview, seconds: float) -> None:
        """Receives bytes that a frame has announced; raises EOFError or OSError when the connection
        is gone, or they are not there within `seconds`."""
        received, end = min(len(buffer), len(self.unread)), time.monotonic() + seconds
        buffer[:received] = self.unread[:received]
        del self.unread[:received]
        while received < len(buffer):
            if not (count := self._socket.recv_into(buffer[received:], 0, socket.MSG_WAITALL)):
                raise EOFError
            received += count
            if received < len(buffer) and time.monotonic() > end:
                raise OSError(f"{received} of {len(buffer)} bytes within {seconds:g} s")

    def _read(self, flags: int = 0) -> None:
        if not (data := self._socket.recv(READ_BYTES, flags)):
            raise EOFError
        self.unread += data

    def authenticate(self, token: str, *, accepted: bool) -> None:
        """Proves to each end that the other knows the token; `accepted` at the listening end.

        Raises:
          AuthenticationError: it does not.
          OSError, EOFError: the connection is gone.
        """
        parts = [deliver_challenge, answer_challenge]
        connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        try:
            with connection:
                for part in parts if accepted else reversed(parts):
                    part(connection, token.encode())
        except AuthenticationError as error:
            raise AuthenticationError(f"another token than that of {self.peer}") from error

    def shutdown(self) -> None:
        """Ends the connection from any thread: threads that receive or send get an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the descriptors; only by the thread that receives."""
        self.shutdown()
        with self._sending:
            self._socket.close()


@contextlib.contextmanager
def cut_off(action: Callable[[], None], seconds: float) -> Iterator[None]:
    """Calls `action`, which makes the body fail, where the body takes longer."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def dial(address: str, token: str, seconds: float, most: int = MAX_FRAME_BYTES) -> Channel:
    """Returns an authenticated channel to the listener at `address`.

    Args:
      seconds: Deadline, once of the connection and once of the challenges.
      most: Largest frame that is received, in bytes.

    Raises:
      AuthenticationError: the two ends have different tokens.
      OSError, EOFError: nothing listens there, or it did not answer in time.
    """
    if is_path(address):
        sock = socket.socket(socket.AF_UNIX)
        with closed_on_error(sock):
            sock.settimeout(seconds)
            sock.connect(address)
    else:
        sock = socket.create_connection(split_address(address), timeout=seconds)
    return _authenticated(sock, most, token, seconds, accepted=False)


def accept(sock: socket.socket, token: str, seconds: float, most: int = MAX_FRAME_BYTES) -> Channel:
    """Returns an authenticated channel of an accepted socket; arguments and errors as `dial`."""
    return _authenticated(sock, most, token, seconds, accepted=True)


def _authenticated(
    sock: socket.socket, most: int, token: str, seconds: float, *, accepted: bool
) -> Channel:
    channel = Channel(sock, most, accepted=accepted)
    with closed_on_error(channel), cut_off(channel.shutdown, seconds):
        channel.authenticate(token, accepted=accepted)
    return channel


def is_path(address: str) -> bool:
    """Whether an address is that of a Unix socket."""
    return address.startswith("/")


def split_address(address: str, name: str = "link address") -> tuple[str, int]:
    """Host, without brackets, and port of `host:port` or `[host]:port`.

    Args:
      name: Name of the address, for the error.

    Raises:
      ConfigError: The address is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{name} {address!r}: expected host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str, port: int) -> list[str]:
    """Returns the addresses that a name stands for, each as host:port: of a headless Service those
    of all its pods. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({join_address(str(info[4][0]), port) for info in found})
