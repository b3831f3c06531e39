"""What a simulated fleet is asked for, and what happens to it meanwhile. See `simulation.py`."""

import msgspec

from jaxserve.planner.noise import Jitter, Lengths


class PagesLink(msgspec.Struct, frozen=True, kw_only=True):
    """How KV pages cross.

    Attributes:
      seconds_per_token: at either end; a hand-off at a time.
      latency: seconds of a hand-off beside its bytes.
    """

    seconds_per_token: float = 0.0
    latency: float = 0.0


class FleetTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the fleet.

    Attributes:
      rate: requests a second, at random (Poisson); or evenly spaced.
      requests: how many.
      warm_up: the first so many do not count.
      cool_down: neither do the last so many, which find an emptying fleet.
      shared: tokens with which a prompt begins like others.
      prefixes: how many such beginnings there are, each as frequent as any other.
      hits: part of every prompt that is the beginning of a text that all have in common, beside
        `shared`; every DP group of the prefill workers has it at the start.
      running: cache lengths, and tokens still to come, of sequences that decode at the start. With
        them the simulation ends when the last request has its first token, as the fleet would go
        on; without, it begins and ends empty.
    """

    lengths: Lengths
    rate: float
    requests: int
    warm_up: int = 0
    cool_down: int = 0
    even: bool = False
    shared: int = 0
    prefixes: int = 1
    hits: float = 0.0
    running: tuple[tuple[int, int], ...] = ()


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is lost, with all that it has.

    Attributes:
      worker: "prefill 0", "domain 1", …
      at: seconds after the start.
      seconds: until it is there again, with nothing in its caches.
    """

    worker: str
    at: float
    seconds: float


class FleetConditions(msgspec.Struct, frozen=True, kw_only=True):
    """How the fleet runs; fields as those of `planner.simulate`.

    Attributes:
      request_seconds: added to every TTFT: HTTP, the router and its messages.
      prefilled: whether prompts come with their KV entries although no worker computes them.
    """

    pages: PagesLink = PagesLink()
    host_seconds: float = 0.0
    jitter: Jitter = Jitter()
    seed: int = 0
    losses: tuple[Loss, ...] = ()
    request_seconds: float = 0.0
    prefilled: bool = False
