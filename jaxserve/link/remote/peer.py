"""Keeps up the attention worker's connection to one ffn worker.

A `Peer` stands for an address. Its thread connects, serves the connection until it is lost, and
begins again. `MessageClient` (`client.py`) sends over any peer that is up.

    CONNECTING → UP ⇄ SUSPECT → DOWN → CONNECTING …      a refused peer is asked again, slowly, one
                                                         that compiles for this worker soon

`connection.py` handles what happens on a connection. Knows nothing of attention and ffn.
"""

import enum
import functools
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.link.remote.connection import MessageConnection
from jaxserve.link.remote.frames import Join
from jaxserve.link.session.channel import AuthenticationError, Deadlines, dial
from jaxserve.link.session.hello import Refusal

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
REFUSED_RETRY_SECONDS = 2.0
PREPARING_RETRY_SECONDS = 0.25


class PeerState(enum.Enum):
    """State of the other end, as this one knows it."""

    CONNECTING = "connecting"
    PREPARING = "preparing"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    REFUSED = "refused"


class Peer:
    """One address of an ffn worker.

    Args:
      on_change: called after every change of `state`.
      limit: seconds of silence allowed to this peer just now.
    """

    def __init__(
        self,
        address: str,
        us: Join,
        token: str,
        deadlines: Deadlines,
        transport: str,
        on_change: Callable[[], None],
        limit: Callable[["Peer"], float],
    ):
        self.address = address
        self.connection: MessageConnection | None = None
        self.reason = "not connected yet"
        """Reason why the peer is not up, for people."""
        self._state = PeerState.CONNECTING
        self._said = False  # whether the log says that it is suspect
        self._us, self._token = us, token
        self._deadlines, self._transport = deadlines, transport
        self._on_change, self._limit = on_change, limit
        self._joining: MessageConnection | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_up, name=f"link to {address}", daemon=True
        )

    @property
    def state(self) -> PeerState:
        """State of the other end, as this one knows it."""
        connection = self.connection
        if self._state is PeerState.UP and connection is not None:
            if connection.failure is not None:
                return PeerState.DOWN
            if connection.silent > self._deadlines.suspect:
                return PeerState.SUSPECT
        return self._state

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def close(self, seconds: float = 5.0) -> None:
        """Ends the connection and the thread."""
        self._closing.set()
        if (connection := self._joining) is not None:
            connection.fail("closed here")
        self._thread.join(seconds)

    def _keep_up(self) -> None:
        while not self._closing.is_set():
            pause = RETRY_SECONDS
            started = time.monotonic()
            try:
                self._live_once()
            except (Refusal, AuthenticationError, ConfigError) as error:
                if isinstance(error, Refusal) and error.later:
                    state, pause = PeerState.PREPARING, PREPARING_RETRY_SECONDS
                else:
                    state, pause = PeerState.REFUSED, REFUSED_RETRY_SECONDS
                    if str(error) != self.reason:
                        logger.warning("link to %s refused: %s", self.address, error)
                self._become(state, str(error))
            except (OSError, EOFError, RuntimeError, msgspec.DecodeError) as error:
                self._become(PeerState.CONNECTING, str(error) or type(error).__name__)
            except Exception as error:  # A defect, which must not end this thread unnoticed.
                logger.exception("link to %s", self.address)
                self._become(PeerState.CONNECTING, f"{type(error).__name__}: {error}")
            # After a long-lived connection, connect again at once.
            self._closing.wait(max(0.0, pause - (time.monotonic() - started)))

    def _live_once(self) -> None:
        dialled = functools.partial(dial, self.address, self._token, self._deadlines.handshake)
        connection = self._joining = MessageConnection(
            dialled(), self._deadlines, self._transport, self._allowed
        )
        try:
            theirs = connection.join(self._us, dialled)
            self.connection = connection
            if self._closing.is_set():
                return
            self._become(PeerState.UP, "")
            logger.info("link to %s is up: %s", self.address, theirs.worker)
            connection.serve()
            if not self._closing.is_set():
                logger.warning("link to %s is down: %s", self.address, connection.failure)
            self._become(PeerState.DOWN, connection.failure or "")
        finally:
            connection.close()
            self.connection = self._joining = None

    def _allowed(self) -> float:
        """Returns the seconds of silence allowed; logs that a peer is suspect, or well again."""
        suspect = self.state is PeerState.SUSPECT
        if suspect and not self._said:
            logger.warning("link to %s is suspect: %s", self.address, self.describe())
        elif self._said and not suspect:
            logger.info("link to %s is well again", self.address)
        self._said = suspect
        return self._limit(self)

    def describe(self) -> str:
        """Returns the peer's problem in words; empty while it is up."""
        state, connection = self.state, self.connection
        if state is PeerState.UP:
            return ""
        if state is PeerState.SUSPECT and connection is not None:
            return f"silent for {connection.silent:.1f} s"
        failure = connection.failure if connection is not None else None
        return failure or self.reason or state.value

    def _become(self, state: PeerState, reason: str) -> None:
        self._state, self.reason = state, reason
        self._on_change()
