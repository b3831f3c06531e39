"""The way out of a process: what ends it, and who is told."""

import threading
from collections.abc import Sequence

import pytest

from jaxserve.fleet.outbox import Outbox
from jaxserve.fleet.request_frames import Cancel, Frame

SECONDS = 20.0


@pytest.mark.parametrize("error", [BlockingIOError(), ValueError("a defect"), KeyError("another")])
def test_an_outbox_that_cannot_go_on_says_so(error: Exception) -> None:
    """Otherwise the receiver would wait for ever."""
    stuck = threading.Event()

    def send(found: Sequence[Frame]) -> None:
        raise error

    box = Outbox("test", send, lambda ended: [], stuck.set)
    box.post(Cancel("x"))
    assert stuck.wait(SECONDS)
    assert not box.flush(SECONDS)


def test_a_receiver_that_is_gone_is_no_reason_to_end_it() -> None:
    stuck, sent = threading.Event(), threading.Event()

    def send(found: Sequence[Frame]) -> None:
        sent.set()
        raise ConnectionResetError

    box = Outbox("test", send, lambda ended: [], stuck.set)
    box.post(Cancel("x"))
    assert sent.wait(SECONDS)
    assert not box.flush(SECONDS)
    assert not stuck.is_set()
