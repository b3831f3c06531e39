"""Frames between a router and a worker; see `worker_port.py` and `worker_connections.py`.

    router → worker   Join     (Prefill | Submit | Adopt | Release | Renew | Cancel | Withdraw
                                | Drain | Become | AskPipeline | Reset | Echo)*
    worker → router   Welcome  (Held | Outputs | Rejected | State | Pipeline | Echo)*   or Refused

Every request has a unique id, which its router made for this attempt to run it. KV pages do not
pass here: a `PagesSource` names the worker that holds them.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from jaxserve.engine.interface import EngineLoad
from jaxserve.engine.request import SamplingParams
from jaxserve.fleet.request_frames import NO_GRAMMAR, Cancel, Frame, GrammarOf, Outputs, Refusal
from jaxserve.link.pages.source import PagesSource
from jaxserve.observe.view import PipelineView

WORKER_FRAME_BYTES = 1 << 28
"""Cap of one frame: a prompt takes four bytes a token."""

PROTOCOL = 3
"""Raised whenever a frame changes its meaning. Routers and workers of different versions work
together while it is the same, so that they can be replaced one by one."""

WorkerRole = Literal["prefill", "domain"]
DrainMode = Literal["", "finish", "move"]
"""What becomes of the requests of a worker that takes nothing new: they `finish` there, or those
that others have room for `move`; empty: it does not drain."""


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a router has to know of a worker.

    Attributes:
      name: for people.
      role: what it does.
      model: digest of the model's config.json; a router takes workers of one model only.
      slots: sequences that run at a time, of all lanes and DP groups.
      groups: DP groups.
      pages: of each.
      page_size: tokens.
      max_length: tokens of prompt and output together.
      vocab: token ids are below it.
      eos_token_ids: the model's end ids.
      info: what `model_info` of the engine says.
      instance: different after every start of the worker.
      weights: digest of the checkpoint's weights; a request never goes from one to another.
      version: of the software; for people.
      can_stand_in: whether it can start again in another role; see `Become`.
      stands_in: whether it is a domain that was started as a prefill worker.
    """

    name: str
    role: WorkerRole
    model: str
    slots: int
    groups: int
    pages: int
    page_size: int
    max_length: int
    vocab: int
    eos_token_ids: list[int]
    info: dict[str, Any]
    instance: str
    weights: str = ""
    version: str = ""
    can_stand_in: bool = False
    stands_in: bool = False

    @property
    def tokens(self) -> int:
        """That its KV cache holds."""
        return self.groups * self.pages * self.page_size


class Join(Frame):
    """First frame of a router."""

    router: str
    version: str
    protocol: int = 0


class Submit(Frame):
    """A request for a domain; answered by `Outputs`, or by `Rejected`.

    Attributes:
      prompt, emitted: int32 as bytes: the prompt, and the tokens that other workers generated.
      params: with a seed, without the grammar, which is beside them.
      seconds: until its deadline.
      source: where a prefill worker holds the pages of prompt and emitted tokens.
      keyed: whether its client may come back for it through another router.
    """

    request_id: str
    prompt: bytes
    params: SamplingParams
    grammar: GrammarOf = NO_GRAMMAR
    seconds: float | None = None
    emitted: bytes = b""
    source: PagesSource | None = None
    keyed: bool = False


class Adopt(Frame):
    """A request whose router is gone, of `State.orphans`; answered by all of its `Outputs`, from
    the first token on, or by `Rejected`. Its prompt is sent to be compared."""

    request_id: str
    prompt: bytes


class Prefill(Frame):
    """A prompt for a prefill worker; answered by `Held`."""

    request_id: str
    prompt: bytes
    cache_salt: str = ""
    priority: int = 0
    seconds: float | None = None


class Release(Frame):
    """The pages of a request are not needed any more, or its prefill is not."""

    request_id: str


class Renew(Frame):
    """Pages that wait for room in a domain are still wanted."""

    hand_off: str


class Withdraw(Frame):
    """A request may go elsewhere: it comes back as `Rejected` if it still waits for a slot, and
    goes on otherwise."""

    request_id: str


class Drain(Frame):
    """Takes nothing new from any router, or, with an empty mode, does again; all are told by
    `State`."""

    mode: DrainMode = ""


class Become(Frame):
    """Has a worker that can do so drain and start its process again: as a domain in a lost one's
    place, or as the prefill worker that it was started as."""

    domain: bool
    why: str = ""


class AskPipeline(Frame):
    """Asks for a view of the steps measured last; answered by `Pipeline`."""


class Reset(Frame):
    """Has a worker forget what its prefix caches have; not answered."""


class Echo(Frame):
    """Comes back as it is: the process lives."""

    number: int


class Welcome(Frame):
    """The worker takes the router in."""

    facts: WorkerFacts


class Refused(Frame):
    """It does not, and closes the connection."""

    reason: str


class Held(Frame):
    """The pages of a prompt are there, or why they are not."""

    request_id: str
    source: PagesSource | None = None
    refusal: Refusal | None = None


class Rejected(Frame):
    """A request is not taken; nothing else comes of it."""

    request_id: str
    refusal: Refusal


class State(Frame):
    """How the worker does; sent twice a second.

    Attributes:
      status: of the engine.
      turn_age: seconds since its step loop last went round: a loop that is stuck grows old.
      others: requests that it has of other routers.
      drain: whether it takes nothing new, and what its requests are to do.
      orphans: requests with keys whose router is gone.
    """

    status: str
    turn_age: float
    load: EngineLoad
    failure: str | None = None
    others: int = 0
    drain: DrainMode = ""
    orphans: Sequence[str] = ()


class Pipeline(Frame):
    """The answer to `AskPipeline`."""

    view: PipelineView


AboutRequest = Submit | Adopt | Prefill | Release | Renew | Cancel | Withdraw
AboutWorker = Join | Drain | Become | AskPipeline | Reset | Echo
FromRouter = AboutRequest | AboutWorker
FromWorker = Welcome | Refused | Held | Outputs | Rejected | State | Pipeline | Echo

encode = msgspec.msgpack.Encoder().encode
decode_from_router = msgspec.msgpack.Decoder(FromRouter).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
"""Decoders; they raise msgspec.DecodeError for anything but such a frame."""


TOKEN_BYTES = 4


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are sent."""
    return np.asarray(token_ids, "<i4").tobytes()


def unpacked(data: bytes) -> list[int]:
    """The inverse of `packed`; raises ValueError for half a token id."""
    return np.frombuffer(data, "<i4").tolist()
