"""Connections that end as soon as this process dies, before the system has freed its memory.

The sockets of a killed process stay open until its memory is freed: 30 to 68 ms for 450 MB. A
thread with its own table of descriptors closes them when it ends, after 0.7 to 4 ms (2 cores,
2026-11-30). Used by `remote/server.py`: each peer keeps one beside the connection of its messages.
"""

import contextlib
import functools
import os
import select
import socket
import threading


def keep(descriptor: int) -> None:
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
