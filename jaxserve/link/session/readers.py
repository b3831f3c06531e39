"""A few threads that read the frames of many sessions of a listening end, and one that keeps their
lifelines. Used by `remote/server.py`, which has a connection to every process of every attention
worker.

A thread waits for any session, handles its frames, and lets it be waited for again. A peer that
stops inside a message holds up the thread that reads it, not the others.

A lifeline is a connection that ends as soon as this process dies, before the system has freed its
memory; each peer keeps one beside the connection of its messages. The sockets of a killed process
stay open until its memory is freed: 30 to 68 ms for 450 MB. A thread with its own table of
descriptors closes them when it ends, after 0.7 to 4 ms (2 cores, 2026-11-30).
"""

import contextlib
import functools
import logging
import os
import select
import socket
import threading
import time

from jaxserve.link.session.channel import TICK_SECONDS
from jaxserve.link.session.served import ServedSession

THREADS = 24
"""Threads of a server: the number of peers that may stop inside a message while others are read."""
ONCE = select.EPOLLIN | select.EPOLLONESHOT
"""A session wakes one thread, and no other one until it is armed again."""

logger = logging.getLogger(__name__)


class Readers:
    """Reads sessions until they have failed, and ends them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.sessions: dict[int, ServedSession] = {}
        """All sessions, by descriptor."""
        self._idle: dict[int, ServedSession] = {}
        """Sessions that no thread reads. The thread that takes one out owns it."""
        self._watched, self._closed = 0.0, False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads."""
        for _ in range(THREADS):
            self._threads.append(
                threading.Thread(target=self._run, name="link reader", daemon=True)
            )
            self._threads[-1].start()

    def add(self, descriptor: int, session: ServedSession) -> None:
        """Reads a session, whose channel has this descriptor, until it fails; calls its `end`."""
        self.sessions[descriptor] = self._idle[descriptor] = session
        self._epoll.register(descriptor, ONCE)

    def close(self, seconds: float) -> None:
        """Ends all sessions within about `seconds`. Idempotent, allowed before `start`."""
        self._closed = True
        for session in list(self.sessions.values()):
            session.fail("the worker ends")
        for thread in self._threads:
            thread.join(seconds / THREADS)

    def _run(self) -> None:
        while self.sessions or not self._closed:
            for descriptor, _ in self._epoll.poll(TICK_SECONDS, 1):
                self._read(descriptor, None)
            # Without a lock: where two threads watch at once, `_idle` gives each session to one.
            if time.monotonic() > self._watched + TICK_SECONDS:
                self._watched = time.monotonic()
                for descriptor in list(self._idle):
                    self._read(descriptor, 0.0)

    def _read(self, descriptor: int, seconds: float | None) -> None:
        """Reads a session and watches its deadlines, unless another thread does so already."""
        if (session := self._idle.pop(descriptor, None)) is None:
            return
        try:
            while session.read_frame(seconds):
                pass
        except Exception as error:  # a defect, which ends this session alone
            logger.exception("link: a connection")
            session.fail(f"{type(error).__name__}: {error}")
        if session.failure is None:
            self._idle[descriptor] = session
            with contextlib.suppress(OSError):  # ended by a thread that has taken it meanwhile
                self._epoll.modify(descriptor, ONCE)
        else:
            del self.sessions[descriptor]
            session.end()


def keep_alive(descriptor: int) -> None:
    """Keeps a connection until its peer closes it or this process dies. The caller's descriptor is
    then that of a socket without a peer."""
    socket.send_fds(_keeper(), [b"+"], [descriptor])
    with socket.socket() as alone:
        os.dup2(alone.fileno(), descriptor, inheritable=False)


@functools.cache
def _keeper() -> socket.socket:
    """Starts the thread, and returns the socket that passes descriptors to it."""
    ends = socket.socketpair()
    threading.Thread(target=_keep, args=ends, name="lifelines", daemon=True).start()
    return ends[0]


def _keep(_near: socket.socket, given: socket.socket) -> None:
    own, poll = given.fileno(), select.poll()
    # Where the system forbids it, connections end with all others of the process.
    with contextlib.suppress(OSError):
        os.unshare(os.CLONE_FILES)
        os.closerange(0, own)
        os.closerange(own + 1, 1 << 20)
    poll.register(own, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == own:
                poll.register(socket.recv_fds(given, 1, 1)[1][0], select.POLLIN)
            else:
                poll.unregister(descriptor)
                os.close(descriptor)
