"""Traffic, losses and settings of a simulated fleet. See `simulation.py`."""

import msgspec

from jaxserve.planner.deploy_fleet import Handoff
from jaxserve.planner.noise import Jitter, Lengths


class FleetTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that arrive at the fleet.

    Attributes:
      rate: requests a second, at random (Poisson) or evenly spaced.
      requests: number of requests.
      warm_up: number of first requests that do not count.
      cool_down: number of last requests that do not count, as they find an emptying fleet.
      shared: tokens of a beginning that a prompt shares with others.
      prefixes: number of such beginnings, all equally frequent.
      hits: share of every prompt, beside `shared`, that is the beginning of a text common to all
        prompts; every DP group that computes prompts has it at the start.
      running: cache lengths, and tokens still to come, of sequences that decode at the start. With
        them the simulation ends when the last request has its first token, since the fleet would go
        on; without them it begins and ends empty.
      percents: percentiles of TTFT and TPOT that are reported beside the usual ones.
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
    percents: tuple[float, float] = (95.0, 95.0)


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Loss of a worker with all its state.

    Attributes:
      worker: "prefill 0", "domain 1", …
      at: seconds after the start.
      seconds: until the worker returns, with empty caches.
    """

    worker: str
    at: float
    seconds: float


class FleetConditions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the fleet; fields have the meaning of those in `planner.simulate`.

    Attributes:
      request_seconds: added to every TTFT: HTTP, the router and its messages.
      prefilled: whether prompts arrive with their KV entries although no worker computes them.
      tokens_a_step: tokens that a sequence gains with each simulated token.
    """

    pages: Handoff = Handoff()
    host_seconds: float = 0.0
    jitter: Jitter = Jitter()
    seed: int = 0
    losses: tuple[Loss, ...] = ()
    request_seconds: float = 0.0
    prefilled: bool = False
    tokens_a_step: float = 1.0
