"""The messages between the engine's process and a face's process, on a socket pair.

Frames are those of `link/session/channel.py`, around MessagePack. Called by `host.py` and by
`child.py` and `remote.py`. Both ends are of one version: the engine's process starts the others.
"""

import socket
from typing import Any

import msgspec

from jaxserve.config.deployment import Server
from jaxserve.engine.request import SamplingParams
from jaxserve.fleet.request_frames import NO_GRAMMAR, Cancel, Frame, GrammarOf, Outputs, Refusal
from jaxserve.fleet.worker_frames import WORKER_FRAME_BYTES, AskPipeline, Pipeline, State
from jaxserve.link.session.channel import Channel

SEND_SECONDS = 10
"""A peer that reads nothing for this long is taken for stuck."""

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


ToFace = Start | Open | Outputs | Admitted | Aborted | State | Pipeline | Abort | Refuse | Stop
ToEngine = Started | Opened | Failed | Submit | Cancel | AbortElsewhere | AskPipeline


encode = msgspec.msgpack.Encoder().encode
decode_to_face = msgspec.msgpack.Decoder(ToFace).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode


def channel_over(end: socket.socket) -> Channel:
    """Returns the channel of one end of a socket pair."""
    channel = Channel(end, WORKER_FRAME_BYTES)
    channel.allow(SEND_SECONDS, SEND_SECONDS)
    return channel
