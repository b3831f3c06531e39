"""A storm of SIGKILLs over a link under load: no wrong answer, and no lane waits for ever.

The gap of a kill is the longest time without an answer around it.
"""

import itertools
import os
import random
import signal
import threading
import time

import pytest

from jaxserve.link.remote.peer import PeerState
from tests.jaxserve.link.remote import toy_server as toy
from tests.jaxserve.link.remote.test_client import KIND, LANES, check, client, on_mesh, values
from tests.jaxserve.link.remote.toy_server import in_use, nursery
from tests.jaxserve.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.multihost]

KILLS = int(os.environ.get("LINK_KILLS", "100"))
LONGEST_GAP = 20.0
"""A hang; not how fast it should be."""


class Load:
    """Three lanes that send and receive without end, each answer compared."""

    def __init__(self, link):
        self.link = link
        self.times: list[float] = []
        """Sum of all answers."""
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            sent = {}
            number = 0
            while not self._ended.is_set():
                for lane in range(LANES):
                    if lane in sent:
                        check(self.link, sent[lane], lane)
                        self.times.append(time.monotonic())
                    sent[lane] = number = number + 1
                    self.link.send(lane, KIND, number % 4, toy.ROWS, on_mesh(values(number)))
        except BaseException as error:
            self.error = error

    def wait_for_answer(self) -> None:
        """Until an answer arrives to what is sent from now on."""
        before = len(self.times)
        until(lambda: len(self.times) > before + 2 * LANES or self.error is not None)
        assert self.error is None

    def end(self) -> None:
        self._ended.set()
        self._thread.join(LONGEST_GAP)
        assert not self._thread.is_alive()
        assert self.error is None

    def gap(self, since: float) -> float:
        """Longest time without an answer that ended after `since`."""
        times = [t for t in self.times[-20_000:] if t > since - 1.0]
        return max((b - a for a, b in itertools.pairwise(times) if b > since), default=0)


@pytest.mark.parametrize("standby", [False, True])
def test_a_storm(standby) -> None:
    """Without a standby every fifth server is killed again before or while it meets the client."""
    draw = random.Random(standby)
    options = [{}, {}] if standby else [{}]
    with nursery() as toys, toys.servers(*options) as started, client(*started) as link:
        load = Load(link)
        load.wait_for_answer()
        by_address = {server.address: server for server in started}
        for _ in range(KILLS):
            until(lambda: all(peer.state is PeerState.UP for peer in link.peers))
            time.sleep(draw.uniform(0.0, 0.2))
            until(lambda: in_use(link) is not None)
            server, killed = by_address[in_use(link)], time.monotonic()
            server.end(signal.SIGKILL)
            if standby:
                load.wait_for_answer()
            server.start()
            if not standby and draw.random() < 0.2:
                time.sleep(draw.uniform(0.0, 0.6))
                server.end(signal.SIGKILL)
                server.start()
            load.wait_for_answer()
            assert load.gap(killed) < LONGEST_GAP
        load.end()
        assert link.counters.failures >= KILLS
