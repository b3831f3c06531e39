"""The messages between the engine's process and a face's process, on a socket pair.

A frame is four bytes of length (big-endian) and a MessagePack object, whose type is in it.
Called by `host.py` and by `child.py` and `remote.py`. Both ends are of one version: the engine's
process starts the others.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.config.deployment import Server
from jaxserve.engine.interface import EngineLoad
from jaxserve.engine.request import SamplingParams
from jaxserve.fleet.request_frames import NO_GRAMMAR, Cancel, Frame, GrammarOf, Outputs, Refusal
from jaxserve.observe.view import PipelineView

SEND_SECONDS = 10.0
"""A peer that reads nothing for this long is taken for stuck."""

_LENGTH = struct.Struct("!I")


# ----------------------------------------------------------------- from the engine's process


class Start(Frame):
    """The first frame: what to serve and where. `server` has the shared ports."""

    model: str
    server: Server
    insecure_bind: bool
    log_format: str
    metrics_folder: str


class Open(Frame):
    """The engine is ready."""

    info: dict[str, Any]


class Admitted(Frame):
    """The answer to `Submit`."""

    number: int
    refusal: Refusal | None = None


class Aborted(Frame):
    """The answer to `AbortElsewhere`."""

    number: int
    found: bool


class State(Frame):
    """The engine's state; sent at least every half second."""

    status: str
    last_turn: float
    load: EngineLoad
    failure: str | None = None


class Pipeline(Frame):
    """The answer to `AskPipeline`."""

    view: PipelineView


class Abort(Frame):
    """Ends a request of this face on behalf of someone other than its client."""

    request_id: str


class Refuse(Frame):
    """Refuse new requests from now on."""


class Stop(Frame):
    """End running requests, wait up to `grace` seconds for responses, exit."""

    grace: float


# ------------------------------------------------------------------- from a face's process


class Started(Frame):
    """The ports are bound."""

    addresses: dict[str, str]


class Opened(Frame):
    """The face accepts requests."""


class Failed(Frame):
    """The face cannot start."""

    refusal: Refusal


class Submit(Frame):
    """A request for the engine; answered by `Admitted`, then `Outputs`.

    Attributes:
      params: without the grammar, which travels beside them.
      owner: the tenant who may abort it.
      deadline: seconds of `time.monotonic`, which all processes of a host share.
    """

    number: int
    request_id: str
    prompt: list[int]
    params: SamplingParams
    owner: str
    deadline: float | None = None
    grammar: GrammarOf = NO_GRAMMAR


class AbortElsewhere(Frame):
    """Ends a request of another face, if it is the owner's; answered by `Aborted`."""

    number: int
    request_id: str
    owner: str | None


class AskPipeline(Frame):
    """Asks for the pipeline's view; answered by `Pipeline`."""


ToFace = Start | Open | Outputs | Admitted | Aborted | State | Pipeline | Abort | Refuse | Stop
ToEngine = Started | Opened | Failed | Submit | Cancel | AbortElsewhere | AskPipeline


class Channel:
    """One end of a socket pair. Any thread may send, one thread receives.

    Args:
      end: of the pair; owned by the channel.
      receives: the union of frames that come from the other end.
    """

    def __init__(self, end: socket.socket, receives: Any):
        self._socket = end
        seconds = struct.pack("ll", int(SEND_SECONDS), 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        self._reader = end.makefile("rb", buffering=2**16)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._sending = threading.Lock()

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends frames.

        Raises:
          OSError: the other end is gone, or stuck.
        """
        parts = []
        for frame in frames:
            body = self._encoder.encode(frame)
            parts += [_LENGTH.pack(len(body)), body]
        with self._sending:
            self._socket.sendall(b"".join(parts))

    def receive(self) -> Any:
        """The next frame; None, once, when the other end is gone."""
        with contextlib.suppress(OSError):
            head = self._reader.read(_LENGTH.size)
            if len(head) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                body = self._reader.read(length)
                if len(body) == length:
                    return self._decoder.decode(body)
        self._reader.close()
        return None

    def close(self) -> None:
        """Ends the connection; a receiver that waits gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._sending:
            self._socket.close()
