"""Results of a simulated deployment (`simulate.py`), and of a fleet (`fleet/simulation.py`)."""

from collections.abc import Sequence

import msgspec
import numpy as np


class Times(msgspec.Struct, frozen=True):
    """Mean and percentiles of seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float] | np.ndarray) -> "Times | None":
        if not len(seconds):
            return None
        found = np.percentile(seconds, [50, 90, 95, 99])
        return cls(float(np.mean(seconds)), *map(float, found))


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulation, without its warm-up.

    Attributes:
      seconds: simulated.
      steps: counted steps of all lanes.
      tokens_per_device: tokens per second and device.
      sequences: mean number of concurrently running sequences.
      context: mean tokens of a running sequence.
      finished: requests that finished.
      tpot: between the tokens of a request, over requests with at least two tokens.
      attention_busy, ffn_busy, dispatch_busy, combine_busy: mean share of the time that devices of
        a role, or a direction of the link, are busy.
    """

    seconds: float
    steps: int
    tokens: float
    tokens_per_second: float
    tokens_per_device: float
    sequences: float
    context: float
    finished: int
    preemptions: int
    tpot: Times | None
    attention_busy: float
    ffn_busy: float
    dispatch_busy: float
    combine_busy: float

    @property
    def bubble(self) -> float:
        return 1 - max(self.attention_busy, self.ffn_busy)


class FleetResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulated fleet (`fleet/simulation.py`).

    Attributes:
      seconds: simulated, from the first counted arrival to the last token.
      finished, refused: requests that ended, and those that the router did not take.
      tokens_per_second: of all domains.
      ttft: from a request's arrival at the router to its first token.
      tpot: between the tokens of a request, over requests with at least two.
      ttft_asked, tpot_asked: the same in seconds at `FleetTraffic.percents`; 0 without requests.
      waits: seconds that a request waited, at the router and in the worker's queue, for a prefill
        worker ("prefill") and for a domain ("domain"); and for the pages link and its bytes
        ("pages").
      replays: requests that continued elsewhere because their worker was lost.
      found: part of the prompts' tokens that prefill workers found in their prefix caches.
      busy: share of the time in which devices of a role attend ("prefill", "domain"; colocated,
        also run the FFN), and of the domains' ffn worker ("ffn").
    """

    seconds: float
    finished: int
    refused: int
    tokens_per_second: float
    ttft: Times | None
    tpot: Times | None
    ttft_asked: float
    tpot_asked: float
    waits: dict[str, Times | None]
    busy: dict[str, float]
    replays: int = 0
    found: float = 0.0
