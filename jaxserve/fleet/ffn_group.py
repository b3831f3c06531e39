"""Several processes of one ffn worker over `pull`, on the control plane that every runtime has.

Process 0 leads: followers report to it which messages have arrived, and it orders what all run
next (`link/remote/server.py`). If one process is lost, all end, to be started again together: their
programs are collective. Called by `serve`; `ffn_runtime.py` knows the group as an argument.
"""

import contextlib
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import numpy as np
from jax.experimental import multihost_utils

from jaxserve.config.deployment import Deployment
from jaxserve.errors import CheckpointError, ConfigError, EngineFailedError
from jaxserve.fleet import bootstrap
from jaxserve.fleet.control import COUNTS, Boundary, collect_counts, own_counts, shapes_digest
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import Leader
from jaxserve.fleet.membership import ProcessArguments
from jaxserve.link.remote.server import MessageServer
from jaxserve.roles.expert_slots import ExpertSlots
from jaxserve.roles.worker import Action

logger = logging.getLogger(__name__)


class FFNGroup:
    """This process's end of the control plane: a `link.remote.server.Group` that moves experts.

    Attributes:
      ended: set when this process is to leave.
      wait_warm_up: waits until all processes have loaded and compiled; gets the digest of the
        weights, which must be equal.
      leave: ends the worker in order, from any of its processes; safe in a signal handler.
      counts: returns the followers' token counts of experts; in process 0.
    """

    def __init__(self, peers: bootstrap.Peers, ended: threading.Event):
        self.process, self.ended, self._peers = peers.identity.process_id, ended, peers
        self.wait_warm_up: Callable[[str], None]
        self.leave: Callable[[str], None]
        if isinstance(peers, Leader):
            self._numbers, self._broadcast = itertools.count(), peers.broadcast
            self.counts = functools.partial(collect_counts, peers)
            self.wait_warm_up = peers.begin_warm_up
            self.leave = lambda reason: ended.set()
        else:
            self.report, self.wait_warm_up = peers.report, peers.wait_warm_up
            self.leave = peers.request_drain

    def begin(self, server: MessageServer, slots: ExpertSlots | None) -> None:
        """Connects a warm server with those of the other processes."""
        peers = self._peers
        if isinstance(peers, Leader):
            peers.on_report = server.reported
            peers.wait_ready()
            return
        peers.answer(COUNTS, lambda: own_counts(slots))
        threading.Thread(target=self._follow, args=(peers, server, slots), daemon=True).start()
        peers.ready()

    def _follow(self, peers: Follower, server: MessageServer, slots: ExpertSlots | None) -> None:
        """Carries out the orders of process 0 until it ends the worker."""
        try:
            for boundary in peers.boundaries():
                if slots is not None:
                    for action in boundary.actions:
                        slots.carry_out(action)
                last = server.ordered(boundary.message) if boundary.message else None
                peers.completed(boundary.number, last)
        except Exception as error:
            self.fail(error)
        self.ended.set()

    def least(self, number: int) -> int:
        """Returns the least of the numbers that the processes give, all at the same time, such as
        those of messages that fit into their memory."""
        return int(multihost_utils.process_allgather(np.int32(number)).min())

    def order(self, data: bytes = b"", actions: Sequence[Action] = ()) -> None:
        shapes = shapes_digest(self._peers.identity.digest, [])
        self._broadcast(Boundary(next(self._numbers), [], shapes, False, list(actions), data))

    def fail(self, error: BaseException) -> NoReturn:
        """Ends this process, which cannot go on, and with it the others."""
        hopeless = isinstance(error, ConfigError | CheckpointError)
        cause = bootstrap.cause_of(error, self._peers)
        bootstrap.abandon(cause, None if hopeless else os.EX_TEMPFAIL, peers=self._peers)


@contextlib.contextmanager
def group_of(process: ProcessArguments, deployment: Deployment) -> Iterator[FFNGroup]:
    """This process as one of its ffn worker, with JAX initialised. The end of the block is the end
    of the process; after the loss of another one its exit code says that a start may help."""
    ended = threading.Event()

    def lost(failure: EngineFailedError, peers: bootstrap.Peers) -> None:
        bootstrap.abandon(failure, os.EX_TEMPFAIL, peers=peers)

    def drained(reason: str, leader: Leader) -> None:
        logger.info("%s: the ffn worker ends", reason)
        ended.set()

    with bootstrap.joined(process, deployment, on_failure=lost, on_drain=drained) as peers:
        assert peers is not None
        group = FFNGroup(peers, ended)
        try:
            yield group
        except Exception as error:
            group.fail(error)
