"""Prefill workers, decode units, the pages link and the fleet of them: how long each takes by
itself, the fleet's keys of a deployment, and what a plan for it says. Called by `deploy.py`.

A prefill worker is a colocated deployment that computes prompts in chunks: every DP group works on
a prompt of its own, and all groups step together, because the experts are divided over them. A
decode unit decodes by itself: an attention and an ffn role together, or a colocated worker.
"""

from typing import Literal, NamedTuple

import msgspec
import numpy as np

from jaxserve.observe.spans import STAGES
from jaxserve.planner.demand import Demand, Level, Requests, Spares
from jaxserve.planner.hardware import MONTH, Hardware
from jaxserve.planner.layout_keys import MOST_TOKENS, Tree, mesh_keys, sequence_keys, token_ms
from jaxserve.planner.layouts import Layout, Target
from jaxserve.planner.results import FleetResult
from jaxserve.planner.search import Found, Pace, Plan
from jaxserve.planner.stage_times import Rooflines, Rows, StageTimes, StepTimes
from jaxserve.roles.layout import pages_for

QUANTILES, POINTS = 5, 3
"""Prompts, and chunks of each, whose seconds stand for all prompts."""
UNIT_CHUNK = 1024
"""Tokens of prompts in the largest step of a unit that computes prompts, too. In steps that decode
`scheduler.token_ms` allows smaller ones, if the TPOT's target does."""
HELD_SLOTS = 16
"""Concurrent prompts of a DP group of a prefill worker."""

DeployedPart = Literal["prefill", "whole"]
"""Part of a fleet that is simulated: prefill with decode units that keep their pace, or all."""


class PrefillWorker(NamedTuple):
    """A kind of prefill worker, with chunks of a DP group and step. Its `capacity` is requests a
    second, if every DP group were always busy; `tokens` are a DP group's cached ones, in the memory
    that the weights leave; `alone` are the seconds of the prompt at the percentile of the TTFT,
    with nothing else in the worker."""

    layout: Layout
    chunk: int
    hardware: Hardware
    tokens: int
    capacity: float
    alone: float

    @property
    def text(self) -> str:
        return f"{self.layout.text}, chunks of {self.chunk}"

    @property
    def dollars(self) -> float:
        """Price in USD per hour."""
        return self.layout.dollars(self.hardware, self.hardware)


class DecodeUnit(NamedTuple):
    """A kind of decode unit: an attention and an ffn role together, or a colocated worker, as the
    search planned it. `slots` are the most sequences of a DP group and lane, `pace` the seconds
    between a sequence's tokens, by their number, `capacity` requests a second within the TPOT, with
    `MOST_BUSY` of the slots taken."""

    plan: Plan
    slots: int
    hardware: tuple[Hardware, Hardware]
    pace: Pace
    capacity: float

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def lanes(self) -> int:
        """Lanes of all DP groups."""
        return self.layout.dp * self.layout.lanes

    @property
    def dollars(self) -> float:
        """Price in USD per hour."""
        return self.layout.dollars(*self.hardware)

    def taken(self, rate: float, output: float) -> float:
        """Sequences of a DP group and lane at this rate (Little's law); at most the slots."""
        taken = 1.0
        for _ in range(12):
            pace = self.pace.seconds(max(1, round(taken)))
            taken = min(rate * output * pace / self.lanes, float(self.slots))
        return taken


class Chunks(NamedTuple):
    """Seconds of prompts in chunks of `chunk` tokens a DP group in a colocated worker."""

    layout: Layout
    times: Rooflines
    chunk: int

    def _step(self, groups: int, tokens: int, length: int) -> float:
        """Seconds of a step in which `groups` DP groups have a chunk that ends at `length`."""
        sizes = np.full(groups, tokens), np.full(groups, length)
        step = self.times.step(Rows(self.layout.dp, np.arange(groups), *sizes, tokens))
        moving = step.dispatch + step.combine
        return float((step.attend.max(axis=1) + moving + step.ffn).sum() + step.leave)

    def _mean(self, groups: int, found: int, prompt: int) -> float:
        """Mean seconds of a full chunk of a prompt; attention grows with the tokens before it."""
        ends = np.linspace(min(found + self.chunk, prompt), prompt, POINTS)
        return float(np.mean([self._step(groups, self.chunk, round(end)) for end in ends]))

    def busy(self, requests: Requests) -> float:
        """Mean seconds of a DP group for a request, with all groups busy."""
        shares = ((n + 0.5) / QUANTILES for n in range(QUANTILES))
        prompts = (requests.quantile(share, of_tokens=True) for share in shares)
        means = [self._mean(self.layout.dp, found, prompt) for prompt, found in prompts]
        return requests.computed / self.chunk * float(np.mean(means))

    def alone(self, prompt: int, found: int) -> float:
        """Seconds of a prompt with nothing else in the worker."""
        whole, rest = divmod(prompt - found, self.chunk)
        seconds = whole * self._mean(1, found, prompt) if whole else 0.0
        return seconds + (self._step(1, rest, prompt) if rest else 0.0)


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a KV hand-off over the pages link: a token's bytes in all layers, the rate of the
    slower end, for one worker, which hand-offs share, and a latency beside the time of its bytes.
    The latter keeps no other one waiting, as each has a stream of its own (`link/pages/client.py`).
    """

    token_bytes: float = 0.0
    bytes_per_second: float = 1.0
    latency: float = 0.0

    def seconds(self, tokens: float) -> float:
        """Time that the bytes of these tokens keep both ends busy."""
        return tokens * self.token_bytes / self.bytes_per_second


class Fleet(NamedTuple):
    """The workers and units that are rented, without spares; without prefill workers the units
    compute prompts themselves. `taken` sequences of a DP group and lane decode at a time."""

    worker: PrefillWorker
    workers: int
    unit: DecodeUnit
    units: int
    taken: float

    @property
    def text(self) -> str:
        return f"{self.workers} prefill workers and {self.units} decode units"

    @property
    def prefill_dollars(self) -> float:
        return self.workers * self.worker.dollars

    @property
    def sequences(self) -> float:
        return self.taken * self.unit.lanes * self.units

    @property
    def pace(self) -> float:
        """Seconds between a sequence's tokens, with `taken` sequences per DP group and lane."""
        return self.unit.pace.seconds(max(1, round(self.taken)))

    @property
    def slots(self) -> int:
        """Slots per DP group and lane. They suffice 99.9 % of the time (mean plus 3.1 standard
        deviations), plus one, because requests are not split between DP groups."""
        most = self.sequences + 3.1 * self.sequences**0.5
        return max(1, min(self.unit.slots, int(most / (self.units * self.unit.lanes)) + 2))

    def keys(self, asked: "Asked", requests: Requests) -> Tree:
        """Configuration keys, dotted, that the fleet's schedulers and its router read."""
        longest, page, worker, layout = asked.longest, asked.page, self.worker, self.unit.layout
        pages = pages_for(longest, page)
        running = layout.lanes * self.slots
        tokens = running * (requests.context + page)
        tokens += 2 * requests.context_spread * running**0.5
        held = max(pages + 1, -int(-tokens // page))
        keys = mesh_keys(layout) | sequence_keys(layout, self.slots, longest, page, held)
        keys["scheduler.page_buckets"] = sorted({-(-pages // 4), pages})
        keys["scheduler.token_ms"] = token_ms(asked.tpot.seconds, self.unit.plan)
        if layout.topology.has("colocated") and self.units > 1:
            keys["domains"] = self.units
        if not self.workers:
            largest = min(keys["scheduler.token_budget"] + UNIT_CHUNK, MOST_TOKENS)
            keys["scheduler.token_buckets"].append(largest)
            return keys | {"scheduler.token_budget": largest}
        return keys | {
            "prefill.workers": self.workers,
            "prefill.mode": "colocated",
            "prefill.lanes": 1,
            "prefill.attention.dp": worker.layout.dp,
            "prefill.attention.tp": worker.layout.tp,
            "prefill.cache.pages": max(pages + 1, worker.tokens // page),
            "prefill.scheduler.slots": HELD_SLOTS,
            "prefill.scheduler.token_budget": worker.chunk,
            "prefill.scheduler.token_buckets": [worker.chunk // 4, worker.chunk],
            "prefill.scheduler.token_ms": 0.0,
            "pages.on_failure": "recompute",
            "pages.recompute_tokens": 8192,
            "pages.held": 256,
            "fleet.prefill_waiting": max(64, 8 * worker.layout.dp),
        }


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Demand and targets of the deployment, and what may be rented. `positions` is the longest
    sequence of the model, `pages_latency` the seconds of a KV hand-off beside its bytes. Workers
    and units of `prefill_devices` and `decode_devices` alone are tried; 0: all."""

    demand: Demand
    ttft: Level
    tpot: Level
    positions: int
    page: int
    target: Target
    spares: Spares
    pages_latency: float = 2e-3
    prefill_devices: int = 0
    decode_devices: int = 0

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return min(self.positions, self.demand.longest(self.page))

    @property
    def text(self) -> str:
        demand = self.demand
        return (
            f"{demand.rate:g} requests a second, {demand.prompt:,} tokens in ({demand.hits:.1%} in "
            f"a prefix cache), {demand.output:,} out; TTFT {self.ttft.text}, TPOT {self.tpot.text}"
        )


class Role(NamedTuple):
    """Devices that one role rents."""

    name: str
    hardware: Hardware
    devices: int
    spare_hosts: int

    @property
    def chips(self) -> float:
        """Accelerators as they are sold, with spares."""
        spare = self.spare_hosts * self.hardware.devices_per_host
        return (self.devices + spare) / self.hardware.jax_devices

    @property
    def dollars(self) -> float:
        """Price in USD per hour."""
        return self.chips * self.hardware.price * self.hardware.jax_devices


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for a whole deployment."""

    fleet: Fleet
    demand: Demand
    link: Handoff
    prediction: FleetResult
    roles: tuple[Role, ...]

    @property
    def dollars(self) -> float:
        """Price in USD per hour."""
        return sum(role.dollars for role in self.roles)

    @property
    def month(self) -> float:
        return self.dollars * MONTH

    def millions(self, requests: Requests) -> dict[str, float]:
        """USD per million prompt tokens, found ones included ("in"), and output tokens ("out")."""
        prefill = sum(role.dollars for role in self.roles if role.name == "prefill")
        millions = 3600 * self.demand.rate / 1e6
        return {
            "in": prefill / (millions * float(requests.prompt.mean())),
            "out": (self.dollars - prefill) / (millions * float(requests.output.mean())),
        }


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The best deployment, the search's decode units, and why other layouts were not taken."""

    best: FleetPlan
    found: Found
    reasons: dict[str, str]


class Scaled:
    """Stage times of a simulation whose tokens stand for `tokens` each, so that it has as many
    times fewer of them to look at. A step stands for `steps`: as many where it decodes, or 1. All
    times are longer by a factor, as with drafts."""

    def __init__(self, times: StageTimes, tokens: int, steps: int = 1, factor: float = 1.0):
        self.layers = times.layers
        self._times, self._tokens = times, tokens
        self._a_step, self._factor = tokens // steps, factor * steps

    def step(self, rows: Rows) -> StepTimes:
        fine = rows._replace(
            tokens=rows.tokens * self._a_step,
            padded=rows.padded * self._a_step,
            length=rows.length * self._tokens,
            reach=rows.reach * self._tokens,
            exchanged=rows.exchanged * self._tokens,
        )
        step, names = self._times.step(fine), (*STAGES, "leave")
        return step._replace(**{name: self._factor * getattr(step, name) for name in names})
