"""One run of `serve` in a follower: every process but the first of a runtime of several."""

import argparse
import logging
from typing import TYPE_CHECKING

from jaxserve.commands.worker_part import WorkerPart, follow_pages
from jaxserve.config.deployment import Deployment
from jaxserve.fleet import bootstrap
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.assembly import Options, open_follower
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.following import Following
from jaxserve.fleet.signals import on_signals, tell_ready
from jaxserve.observe.recorder import Recorder
from jaxserve.server.choice import Probes

if TYPE_CHECKING:
    from jaxserve.fleet.prepared import Prepared

logger = logging.getLogger("jaxserve.serve")


def follow(
    deployment: Deployment,
    options: argparse.Namespace,
    process: ProcessArguments,
    part: WorkerPart | None = None,
    prepared: "Prepared | None" = None,
) -> int:
    """The life of every process but 0: follows the leader's plans until it shuts down.

    A signal is forwarded to the leader: the whole deployment drains, for which it needs this
    process, and ends. The second signal ends this process at once.
    """
    follower: Follower | None = None

    def drain(name: str) -> bool:
        if follower is not None:
            logger.info("%s: asking the leader to drain the deployment", name)
            follower.request_drain(name)
        return follower is not None

    on_signals(drain)
    recorder = Recorder(process=process.process_id) if options.timeline else None
    with (
        Probes(deployment, options.insecure_bind) as probes,
        bootstrap.joined(process, deployment) as peers,
    ):
        assert isinstance(peers, Follower)
        follower = peers
        probes.watch(peers)

        given = Options(token=process.token, recorder=recorder, prepared=prepared)
        runtime = open_follower(deployment, peers, given)
        pages = follow_pages(deployment, part, runtime.driver)
        following = Following(runtime, peers, recorder, pages)
        logger.info("%s: ready", peers.identity)
        tell_ready()
        following.run()
    return 0
