"""Hands the leader's messages for all on to the processes below this follower.

`follower.py` sends into it what comes from above, as it came. No process is asked again or
reconnects: a lost one is missed by the leader. Knows nothing of the meaning of messages.
"""

import math
from typing import ClassVar

from jaxserve.fleet import control
from jaxserve.fleet.below import HELLO_SECONDS, LOOK_SECONDS, Below
from jaxserve.fleet.listening import listening_socket
from jaxserve.link.session.channel import Channel, Deadlines, split_address
from jaxserve.link.session.listener import Listener
from jaxserve.link.session.messages import Echo

MOST_BELOW = 256
"""Connections at a time: the other processes of this host, and the first ones of a few hosts."""


class Relay:
    """Listens for the processes below this one.

    Args:
      identity: of this process; those below have equal facts.
      token: secret of the deployment.
    """

    def __init__(self, identity: control.Identity, token: str):
        self.identity = identity
        self.below: list[_Below] = []
        """Processes that have introduced themselves."""
        serve, seconds = lambda channel: _Below(self, channel).live(), HELLO_SECONDS
        self._listener = Listener("plans", token, serve, most=MOST_BELOW, seconds=seconds)

    def listen(self, host: str) -> int:
        """Takes processes from now on; returns the port.

        Raises:
          OSError: the host is none of this machine's.
        """
        return split_address(self._listener.start(listening_socket(host)))[1]

    def post(self, body: bytes) -> None:
        """Sends a message to all below; waits for nobody."""
        for below in self.below:
            below.post(body)

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        self._listener.close(LOOK_SECONDS)


class _Below(Below):
    """A process to which this one hands on the messages for all. It sends signs of life alone."""

    def __init__(self, relay: Relay, channel: Channel):
        deadlines = Deadlines(handshake=HELLO_SECONDS, down=math.inf)
        super().__init__("plans", channel, relay.identity, deadlines)
        self._relay = relay

    def _admit(self, join: control.Register) -> control.Accepted:
        return control.Accepted(self._relay.identity)

    def _joined(self) -> None:
        self._relay.below.append(self)

    def _ignore(self, echo: Echo) -> None:
        """Returns none: only messages of the leader show that they get through."""

    handlers: ClassVar = {Echo: _ignore}
