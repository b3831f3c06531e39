"""Meetings of the processes of a preflight: each gives a value, all get the values of all.

Process 0 listens on the port behind that of `--control`, and the others dial it; each has a session
with process 0 (`link/session/`). Knows nothing of checks and devices.
"""

import contextlib
import math
import queue
import socket
import threading
import time
from typing import Any, ClassVar, NamedTuple, Self

import msgspec

from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.link.session.channel import (
    AuthenticationError,
    Channel,
    Deadlines,
    dial,
    join_address,
    split_address,
)
from jaxserve.link.session.greet import greet
from jaxserve.link.session.hello import Refusal, make_hello
from jaxserve.link.session.listener import Listener, listen
from jaxserve.link.session.messages import Greeting
from jaxserve.link.session.served import ServedSession
from jaxserve.link.session.session import Session
from jaxserve.preflight.outcomes import Failed

FRAME_BYTES = 1 << 28
"""A frame holds the spans of a few steps."""
PINGS = 9
DEADLINES = Deadlines(down=math.inf)
"""A process may be silent while it compiles; each wait for a value has a deadline of its own."""
_RETRY_SECONDS = 0.1


class Join(Greeting, frozen=True, tag="join"):
    """First frame of a process that dials."""

    number: int


class Welcome(Greeting, frozen=True, tag="welcome"):
    """Answer of process 0."""


class Value(msgspec.Struct, frozen=True, tag="value", array_like=True):
    """The value of one process, the values of all, or a time."""

    value: Any


class _Kept:
    """The values that a session has received, and None once it has ended."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.values: queue.SimpleQueue[Value | None] = queue.SimpleQueue()

    def _keep(self, message: Value) -> None:
        self.values.put(message)

    def _drop(self) -> None:
        self.values.put(None)


class _Host(_Kept, Session):
    """The session of another process with process 0."""

    greeting = Welcome
    handlers: ClassVar = {Value: _Kept._keep}


class _Visitor(_Kept, ServedSession):
    """A session of process 0 with another process."""

    greeting = Join

    handlers: ClassVar = {Value: _Kept._keep}

    def __init__(self, meeting: "Meeting", channel: Channel):
        super().__init__("meeting", channel, meeting.hello, DEADLINES)
        self._meeting = meeting

    def _admit(self, join: Join) -> Welcome:
        self._meeting.sessions[join.number] = self
        self._meeting.find_itself(self._channel)
        return Welcome(self._hello)

    def _joined(self) -> None:
        if len(self._meeting.sessions) == self._meeting.count - 1:
            self._meeting.whole.set()


class Clock(NamedTuple):
    """The clock of process 0 as seen from this process."""

    ahead: float
    """Seconds that the clock of process 0 is ahead of this process's."""
    error: float
    """Half of the shortest round trip, in seconds."""


class Meeting:
    """The sessions between process 0 and the others. Alone, a process meets itself.

    Every process makes the same calls in the same order.

    Args:
      process: which one this is.
    """

    def __init__(self, process: ProcessArguments):
        self.number, self.count = process.process_id, process.processes
        self.hello = make_hello(f"process {self.number}", {"processes": f"{self.count}"})
        self.local_host = "127.0.0.1"
        """The address by which the other processes reach this host."""
        self._token = process.token
        self.sessions: dict[int, _Visitor | _Host] = {}
        """Sessions by the number of the process at the other end."""
        self.whole = threading.Event()
        """Set at process 0 once all others have joined."""
        self._server = Listener(
            *("meeting", self._token, lambda channel: _Visitor(self, channel).live()),
            most=self.count,
            seconds=DEADLINES.handshake,
            frame_bytes=FRAME_BYTES,
        )
        self._address, self._bind = "", ""
        if self.count > 1:
            self._address = behind(process.control_address, process.coordinator)
            self._bind = self._address
            if process.control_bind:
                host = split_address(process.control_bind)[0]
                self._bind = join_address(host, split_address(self._address)[1])

    def begin(self, seconds: float) -> None:
        """Waits for all processes.

        Raises:
          Failed: names the processes that did not come, or says why process 0 refuses this one.
        """
        if self.count == 1:
            return
        if self.number:
            channel = self._dialled(time.monotonic() + seconds)
            self.find_itself(channel)
            session = self.sessions[0] = _Host(channel, DEADLINES)
            threading.Thread(target=session.live, name="meeting", daemon=True).start()
            return
        self._server.start(listen(self._bind, self._token))
        if not self.whole.wait(seconds):
            absent = [f"{n}" for n in range(1, self.count) if n not in self.sessions]
            missed = f"processes {', '.join(absent)} did not come to {self._address}"
            raise Failed(f"{missed} in {seconds:g} s")

    def find_itself(self, channel: Channel) -> None:
        """Notes this host's address on the network that leads to another process."""
        host, port = split_address(channel.peer)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((host, port))
            self.local_host = probe.getsockname()[0]

    def gather(self, value: Any, seconds: float) -> list[Any]:
        """Returns the values of all processes in their order.

        Raises:
          Failed: a process left or was late.
        """
        end = time.monotonic() + seconds
        if self.number:
            self._send(0, value)
            return list(self._received(0, seconds + 1.0))
        values = [value]
        for number in range(1, self.count):
            values.append(self._received(number, end - time.monotonic()))
        found: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(values))
        for number in range(1, self.count):
            self._send(number, found)
        return found

    def clock(self, seconds: float) -> Clock:
        """Compares this process's clock with that of process 0, by the shortest round trip."""
        if self.number == 0:
            for number in range(1, self.count):
                for _ in range(PINGS):
                    self._received(number, seconds)
                    self._send(number, time.time())
            return Clock(0.0, 0.0)
        found = []
        for _ in range(PINGS):
            sent = time.time()
            self._send(0, None)
            there = self._received(0, seconds)
            arrived = time.time()
            found.append(Clock(there - (sent + arrived) / 2, (arrived - sent) / 2))
        return min(found, key=lambda one: one.error)

    def _dialled(self, end: float) -> Channel:
        while True:
            try:
                channel = dial(self._address, self._token, DEADLINES.handshake, FRAME_BYTES)
                join = Join(self.hello, self.number)
                greet(channel, join, Welcome, _Host.decode, DEADLINES.handshake)
                return channel
            except (AuthenticationError, Refusal) as error:
                raise Failed(str(error)) from None
            except (OSError, EOFError, msgspec.DecodeError) as error:
                if time.monotonic() > end:
                    raise Failed(
                        f"process 0 cannot be reached at {self._address}: {error}"
                    ) from None
                time.sleep(_RETRY_SECONDS)

    def _send(self, number: int, value: Any) -> None:
        with contextlib.suppress(OSError):  # `_received` says that it has left
            self.sessions[number].send(Value(value))

    def _received(self, number: int, seconds: float) -> Any:
        session = self.sessions[number]
        try:
            message = session.values.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise Failed(f"process {number} said nothing for {seconds:.0f} s") from None
        if message is None:
            raise Failed(f"process {number} has left: {session.failure}")
        return message.value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close(DEADLINES.handshake)
        for session in self.sessions.values():
            session.fail("the preflight has ended")


def behind(control: str, coordinator: str) -> str:
    """The address of the meeting: on the host of the control plane, the next port that the
    coordination service does not have."""
    host, port = split_address(control)
    taken = {port, split_address(coordinator)[1]}
    port += 1
    while port in taken:
        port += 1
    return join_address(host, port)
