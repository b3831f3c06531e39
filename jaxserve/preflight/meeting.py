"""Meetings of the processes of a preflight: each gives a value, all get the values of all.

Process 0 listens on the port behind that of `--control`, and the others dial it. Frames are
authenticated as those of links (`link/session/channel.py`). Knows nothing of checks and devices.
"""

import time
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.link.session.channel import (
    AuthenticationError,
    Channel,
    accept,
    dial,
    join_address,
    split_address,
)
from jaxserve.link.session.listening import listen
from jaxserve.preflight.outcomes import Failed

FRAME_BYTES = 1 << 28
"""A frame holds the spans of a few steps."""
PINGS = 9
_RETRY_SECONDS = 0.1
_HANDSHAKE_SECONDS = 5.0


class Clock(NamedTuple):
    """The clock of process 0 as seen from this process."""

    ahead: float
    """Seconds that the clock of process 0 is ahead of this process's."""
    error: float
    """Half of the shortest round trip, in seconds."""


class Meeting:
    """The connections between process 0 and the others. Alone, a process meets itself.

    Every process makes the same calls in the same order.

    Args:
      process: which one this is.
    """

    def __init__(self, process: ProcessArguments):
        self.number, self.count = process.process_id, process.processes
        self._token = process.token
        self._channels: dict[int, Channel] = {}
        self._address, self._bind = "", ""
        if self.count > 1:
            self._address = behind(process.control_address, process.coordinator)
            self._bind = self._address
            if process.control_bind:
                host = split_address(process.control_bind)[0]
                self._bind = join_address(host, split_address(self._address)[1])

    @property
    def local_host(self) -> str:
        """The address by which the other processes reach this host."""
        return next((one.local_host for one in self._channels.values()), "127.0.0.1")

    def begin(self, seconds: float) -> None:
        """Waits for all processes.

        Raises:
          Failed: names the processes that did not come.
        """
        end = time.monotonic() + seconds
        if self.count == 1:
            return
        if self.number:
            self._channels[0] = self._dialled(end)
            self._channels[0].send(msgspec.json.encode(self.number))
            return
        with listen(self._bind, self._token) as server:
            while len(self._channels) < self.count - 1:
                server.settimeout(max(0.01, end - time.monotonic()))
                try:
                    sock, _ = server.accept()
                    channel = accept(sock, self._token, _HANDSHAKE_SECONDS, FRAME_BYTES)
                except TimeoutError:
                    raise Failed(self._absent(seconds)) from None
                except (AuthenticationError, EOFError, OSError):
                    continue  # a stranger
                number = self._received(channel, _HANDSHAKE_SECONDS, "a process")
                self._channels[number] = channel

    def gather(self, value: Any, seconds: float) -> list[Any]:
        """Returns the values of all processes in their order.

        Raises:
          Failed: a process left or was late.
        """
        end = time.monotonic() + seconds
        if self.number:
            self._channels[0].send(msgspec.json.encode(value))
            return list(self._received(self._channels[0], seconds + 1.0, "process 0"))
        values = {0: value}
        for number, channel in self._channels.items():
            left = max(0.0, end - time.monotonic())
            values[number] = self._received(channel, left, f"process {number}")
        found = [values[number] for number in range(self.count)]
        text = msgspec.json.encode(found)
        for channel in self._channels.values():
            channel.send(text)
        return msgspec.json.decode(text)

    def clock(self, seconds: float) -> Clock:
        """Compares this process's clock with that of process 0, by the shortest round trip."""
        if self.number == 0:
            for number, channel in self._channels.items():
                for _ in range(PINGS):
                    self._received(channel, seconds, f"process {number}")
                    channel.send(msgspec.json.encode(time.time()))
            return Clock(0.0, 0.0)
        found = []
        for _ in range(PINGS):
            sent = time.time()
            self._channels[0].send(b"0")
            there = self._received(self._channels[0], seconds, "process 0")
            arrived = time.time()
            found.append(Clock(there - (sent + arrived) / 2, (arrived - sent) / 2))
        return min(found, key=lambda one: one.error)

    def _dialled(self, end: float) -> Channel:
        while True:
            try:
                return dial(self._address, self._token, _HANDSHAKE_SECONDS, FRAME_BYTES)
            except AuthenticationError as error:
                raise Failed(str(error)) from None
            except (OSError, EOFError) as error:
                if time.monotonic() > end:
                    raise Failed(
                        f"process 0 cannot be reached at {self._address}: {error}"
                    ) from None
                time.sleep(_RETRY_SECONDS)

    def _absent(self, seconds: float) -> str:
        absent = [str(n) for n in range(1, self.count) if n not in self._channels]
        return f"processes {', '.join(absent)} did not come to {self._address} in {seconds:g} s"

    def _received(self, channel: Channel, seconds: float, name: str) -> Any:
        try:
            if not channel.wait(seconds):
                raise Failed(f"{name} said nothing for {seconds:.0f} s")
            return msgspec.json.decode(channel.receive())
        except (OSError, EOFError):
            raise Failed(f"{name} has left") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for channel in self._channels.values():
            channel.close()


def behind(control: str, coordinator: str) -> str:
    """The address of the meeting: on the host of the control plane, the next port that the
    coordination service does not have."""
    host, port = split_address(control)
    taken = {port, split_address(coordinator)[1]}
    port += 1
    while port in taken:
        port += 1
    return join_address(host, port)
