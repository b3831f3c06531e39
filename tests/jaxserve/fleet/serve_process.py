"""`jaxserve.serve` as two processes with a fake engine, whose warm-up really crosses between them.

Started by `test_serve_processes.py` through the local launcher. The variable FAILURE says what goes
wrong after the first transfer: nothing, an error on one of the processes, or a leader that takes
its time, while the follower waits inside a device call as in a real warm-up.
"""

import os
import sys
import time
from types import SimpleNamespace

from jaxserve import serve
from jaxserve.commands import following, serving
from jaxserve.config.deployment import Deployment
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import Leader
from tests.jaxserve.fleet.process import exchange
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import ids_of

FAILURE = os.environ["FAILURE"]


def lead(deployment: Deployment, options: object, leader: Leader) -> FakeEngine:
    device_loop = exchange(False)
    leader.begin_warm_up()
    next(device_loop)
    print("crossed", flush=True)
    if FAILURE == "leader":
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    if FAILURE == "slow":
        time.sleep(60)
    leader.wait_ready()
    return FakeEngine(ids_of("x" * 40), pace=0.05)


def follow(deployment: Deployment, follower: Follower, options: object) -> SimpleNamespace:
    device_loop = exchange(False)
    follower.wait_warm_up()
    next(device_loop)
    if FAILURE == "follower":
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    if FAILURE:
        next(device_loop)
    follower.ready()
    return SimpleNamespace(driver=None)


class Following:
    """Follows a leader that sends no plans."""

    def __init__(self, runtime: object, follower: Follower, *options: object):
        self.follower = follower

    def run(self) -> None:
        assert not list(self.follower.boundaries())


if __name__ == "__main__":
    serving.open_engine, following.open_follower, following.Following = lead, follow, Following
    sys.exit(serve.main())
