"""A lifeline ends as soon as its process does: a thread keeps it outside the process's table."""

import os
import socket
import sys
import threading

import pytest

from jaxserve.link.session import readers
from tests.jaxserve.waiting import until


def test_one_thread_keeps_connections_in_a_table_of_its_own_until_peers_close_them():
    if os.system(f"{sys.executable} -c 'import os; os.unshare(os.CLONE_FILES)'"):
        pytest.skip("the system forbids it")

    def kept():
        return [os.path.realpath(f"{folder}/{one}")[-len(name) :] for one in os.listdir(folder)]

    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer, (end, _) = socket.create_connection(listening.getsockname()), listening.accept()
    name = os.readlink(f"/proc/self/fd/{end.fileno()}")
    readers.keep_alive(end.fileno())
    (thread,) = (one for one in threading.enumerate() if one.name == "lifelines")
    folder = f"/proc/self/task/{thread.native_id}/fd"
    with peer:
        until(lambda: name in kept() and len(kept()) == 2)
    with end, pytest.raises(OSError, match="not connected"):
        end.recv(1)
    until(lambda: len(kept()) == 1)
