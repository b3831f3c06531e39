"""Messages of a session between a router, which dials, and a worker.

The two tables are `RouterConnection.handlers` (`worker_port.py`) and `WorkerConnection.handlers`
(`worker_connections.py`):

    router → worker   Join     (Prefill | Submit | Adopt | Release | Renew | Cancel | Withdraw
                                | Drain | Become | AskPipeline | Reset | Rebalance)*
    worker → router   Welcome  (Held | Outputs | Rejected | State | Pipeline | Rebalanced)*
                      or Refused

Every request has a unique id, which its router made for this attempt to run it. KV pages do not
pass here: a `PagesSource` names the worker that holds them.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from jaxserve.engine.request import SamplingParams
from jaxserve.fleet.request_frames import NO_GRAMMAR, Frame, GrammarOf, Outputs, SentError
from jaxserve.link.pages.source import PagesSource
from jaxserve.link.session.hello import Hello, make_hello
from jaxserve.link.session.messages import Greeting
from jaxserve.observe.load import EngineLoad
from jaxserve.observe.view import PipelineView

WORKER_FRAME_BYTES = 1 << 28
"""Cap of one frame: a prompt takes four bytes a token."""

WorkerRole = Literal["prefill", "domain"]
DrainMode = Literal["", "finish", "move"]
"""Fate of the requests of a draining worker. `finish`: they finish there. `move`: those that other
workers have room for move. Empty: the worker does not drain."""


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a worker, sent to routers.

    Attributes:
      role: the worker's current role.
      slots: sequences that run at a time, in all lanes and DP groups.
      groups: DP groups.
      pages: pages of each DP group.
      page_size: tokens a page.
      max_length: most tokens of prompt and output together.
      vocab: token ids are below it.
      eos_token_ids: the model's end ids.
      info: `model_info` of the engine.
      weights: digest of the checkpoint's weights; a request never goes from one to another.
      version: version of the software, for people.
      can_stand_in: whether it can start again in another role; see `Become`.
      stands_in: whether it was started in the other role.
      attention_cost: of a prefill worker: a prompt of n tokens takes n + n² times this, as
        `roles/sizing.py` counts.
    """

    role: WorkerRole
    slots: int
    groups: int
    pages: int
    page_size: int
    max_length: int
    vocab: int
    eos_token_ids: list[int]
    info: dict[str, Any]
    weights: str = ""
    version: str = ""
    can_stand_in: bool = False
    stands_in: bool = False
    attention_cost: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that the worker's KV cache holds."""
        return self.groups * self.pages * self.page_size


def hello_of(who: str, model: str) -> Hello:
    """Returns the introduction of a router or a worker.

    Args:
      model: Digest of the model's config.json; a router takes workers of one model only.
    """
    return make_hello(who, {"model": model})


class Submit(Frame):
    """Hands a request to a domain, which answers with `Outputs` or `Rejected`.

    Attributes:
      prompt, emitted: int32 as bytes: the prompt, and the tokens that other workers generated.
      params: parameters with a seed, without the grammar, which has a field of its own.
      seconds: seconds until the request's deadline.
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
    """Takes over a request of `State.orphans`, whose router is gone. Answered by all of its
    `Outputs`, from the first token on, or by `Rejected`. The prompt is sent for comparison."""

    request_id: str
    prompt: bytes


class Prefill(Frame):
    """Hands a prompt to a prefill worker (answer: `Held`). `trace`: see `SamplingParams`."""

    request_id: str
    prompt: bytes
    cache_salt: str = ""
    priority: int = 0
    seconds: float | None = None
    trace: str = ""


class Release(Frame):
    """Gives up the pages of a request, or its prefill."""

    request_id: str


class Renew(Frame):
    """Renews the lease of pages that wait for room in a domain."""

    hand_off: str


class Withdraw(Frame):
    """Lets a request go elsewhere: `Rejected` if it still waits for a slot, else it runs on."""

    request_id: str


class Drain(Frame):
    """Makes a worker accept no new requests from any router, or, with an empty mode, accept them
    again. All routers learn of it from `State`."""

    mode: DrainMode = ""


class Become(Frame):
    """Makes a worker that supports it drain and start again: as a domain in place of a lost one, or
    as the prefill worker that it was started as."""

    domain: bool
    why: str = ""
    hurry: bool = False
    """True: the worker starts again within seconds, though requests may be left."""


class AskPipeline(Frame):
    """Asks for the timeline of the latest measured steps; answered by `Pipeline`."""


class Reset(Frame):
    """Makes a worker empty its prefix caches; not answered."""


class Rebalance(Frame):
    """Makes a domain rebalance its experts, or only propose it; answered by `Rebalanced`."""

    number: int
    dry_run: bool


class Welcome(Greeting, frozen=True, tag="Welcome"):
    """Accepts a router."""

    facts: WorkerFacts


class Held(Frame):
    """Reports that the pages of a prompt are held, or why they are not."""

    request_id: str
    source: PagesSource | None = None
    refusal: SentError | None = None


class Rejected(Frame):
    """Reports that a request is not accepted; no output of it will follow."""

    request_id: str
    refusal: SentError


class State(Frame):
    """State of a worker, sent twice a second.

    Attributes:
      status: status of the engine.
      turn_age: seconds since the step loop last went round; keeps growing if the loop is stuck.
      others: requests that came from other routers.
      drain: whether the worker drains, and what happens to its requests.
      orphans: requests with keys whose router is gone.
      becomes: whether it drains because it is to start again in the other role.
    """

    status: str
    turn_age: float
    load: EngineLoad
    failure: str | None = None
    others: int = 0
    drain: DrainMode = ""
    orphans: Sequence[str] = ()
    becomes: bool = False


class Pipeline(Frame):
    """Answers `AskPipeline`."""

    view: PipelineView


class Rebalanced(Frame):
    """Answers the `Rebalance` of the same number.

    Attributes:
      proposal: fields of a `roles.worker.Proposal`; None: there is none.
      why: why there is none.
    """

    number: int
    proposal: dict[str, Any] | None = None
    why: str = ""


FromWorker = Held | Outputs | Rejected | State | Pipeline | Rebalanced

TOKEN_BYTES = 4


def packed(token_ids: Sequence[int]) -> bytes:
    """Encodes token ids as int32 bytes."""
    return np.asarray(token_ids, "<i4").tobytes()


def unpacked(data: bytes) -> list[int]:
    """The inverse of `packed`; raises ValueError for half a token id."""
    return np.frombuffer(data, "<i4").tolist()
