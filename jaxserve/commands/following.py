"""One run of `serve` in every process but the leader's, of a runtime of several processes."""

import argparse
import functools
import logging
import os
import signal
from types import FrameType

from jaxserve.commands.priority import take_serving_priority
from jaxserve.commands.worker_part import WorkerPart, follow_pages
from jaxserve.config.deployment import Deployment
from jaxserve.engine.build_runtime import builder_of
from jaxserve.fleet import bootstrap, following
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.follower import Follower
from jaxserve.observe.recorder import Recorder
from jaxserve.server.choice import Probes

logger = logging.getLogger("jaxserve.serve")


def follow(
    deployment: Deployment,
    options: argparse.Namespace,
    process: ProcessArguments,
    part: WorkerPart | None = None,
) -> int:
    """The life of every process but 0: follows the leader's plans until it shuts down.

    A signal is forwarded to the leader: the whole deployment drains, for which it needs this
    process, and ends. The second signal ends this process at once.
    """
    follower: Follower | None = None
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        if follower is None:
            raise SystemExit(128 + number)
        name = signal.Signals(number).name
        logger.info("%s: asking the leader to drain the deployment", name)
        follower.request_drain(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    recorder = Recorder(process=process.process_id) if options.timeline else None
    with (
        Probes(deployment, options.insecure_bind) as probes,
        bootstrap.joined(process, deployment) as peers,
    ):
        assert isinstance(peers, Follower)
        follower = peers
        probes.watch(peers)

        def on_ready() -> None:
            take_serving_priority()
            logger.info("%s: ready", peers.identity)

        following.follow(
            deployment,
            follower,
            build=builder_of(deployment),
            recorder=recorder,
            on_ready=on_ready,
            pages=functools.partial(follow_pages, deployment, part),
        )
    return 0
