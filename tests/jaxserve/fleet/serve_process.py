"""`jaxserve.serve` as two processes with a fake engine, whose warm-up really crosses between them.

Started by `test_serve_processes.py` through `launch/local.py`. The variable FAILURE says what goes
wrong after the first transfer: nothing, an error on one of the processes, or a leader that takes
its time, while the follower waits inside a device call as in a real warm-up.
"""

import os
import sys
import time
from collections.abc import Callable

from jaxserve import serve
from jaxserve.config.deployment import Deployment
from jaxserve.fleet import following, leading
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import Leader
from tests.jaxserve.fleet.process import exchange
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import ids_of

FAILURE = os.environ["FAILURE"]


def lead(deployment: Deployment, leader: Leader, **options: object) -> FakeEngine:
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


def follow(
    deployment: Deployment, follower: Follower, *, on_ready: Callable[[], None], **options: object
) -> None:
    device_loop = exchange(False)
    follower.wait_warm_up()
    next(device_loop)
    if FAILURE == "follower":
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    if FAILURE:
        next(device_loop)
    follower.ready()
    on_ready()
    assert not list(follower.boundaries())


if __name__ == "__main__":
    leading.lead, following.follow = lead, follow
    sys.exit(serve.main())
