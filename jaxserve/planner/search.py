"""Searches for the cheapest layouts that meet a target, for `plan search`, `map` and `deploy`.

Three modes: `afd`, attention and FFN on separate devices of any two kinds; `ep`, colocated, with
one DP group per device and the experts divided over all of them; `tp`, colocated, with everything
sharded over the devices of one fast link. Plain arithmetic by `stages.py`.

A step with k drafts feeds 1 + k tokens a sequence; the multi-token-prediction module is passed k
times: once over all of the step's tokens, then over one token a sequence (xDeepServe §4.6).
"""

import functools
import itertools
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from jaxserve.observe.spans import STAGES, AFDStage
from jaxserve.planner.balance import Balance
from jaxserve.planner.calibration import NOTHING
from jaxserve.planner.demand import Requests
from jaxserve.planner.hardware import MONTH, Hardware
from jaxserve.planner.layouts import Layout, Layouts, Target
from jaxserve.planner.memory import Memory, largest
from jaxserve.planner.models import AttentionLayers, FFNLayers, largest_normal
from jaxserve.planner.noise import Skew, mean_busiest
from jaxserve.planner.stage_times import attend
from jaxserve.planner.stages import Calculator, StageTime


def tokens_a_step(acceptance: Sequence[float], drafts: int) -> float:
    """Returns the mean tokens that a sequence gains in a step. `acceptance` has the rate of the
    first draft, of the second if the first was accepted, and so on."""
    return 1 + sum(itertools.accumulate(acceptance[:drafts], operator.mul))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with a batch size, and the predictions for it."""

    layout: Layout
    batch: int
    """Sequences per DP group and lane."""
    tpot: float
    """Seconds between a sequence's tokens."""
    stages: dict[str, StageTime]
    """Times of the stages by name, for the most frequent kind of layer."""
    tokens_per_second: float
    dollars: float
    """USD per million tokens."""
    attention_bytes: int = 0
    """Memory of an attention device: weights and cache; 0: not asked (`Searcher.with_memory`)."""
    ffn_bytes: int = 0
    """Memory of an ffn device; 0 if colocated."""
    tokens_a_step: float = 1.0
    """Tokens that a sequence gets in a step, with its accepted drafts."""

    @property
    def sequences(self) -> int:
        return self.layout.dp * self.layout.lanes * self.batch

    @property
    def tokens_per_device(self) -> float:
        return self.tokens_per_second / self.layout.devices

    @property
    def month(self) -> float:
        return self.dollars * self.tokens_per_second * 3600 * MONTH / 1e6

    @property
    def slowest(self) -> tuple[str, str]:
        """The stage that sets the pace, and what bounds it. The link is one stage."""
        seconds = {name: stage.seconds for name, stage in self.stages.items()}
        link = seconds["dispatch"] + seconds["combine"]
        if self.layout.topology.has("ffn") and link > max(seconds["attend"], seconds["ffn"]):
            return "link", self.stages["dispatch"].bound
        name = max(seconds, key=seconds.__getitem__)
        return name, self.stages[name].bound


class Found(NamedTuple):
    """The results of a search."""

    plans: list[Plan]
    """Every layout that meets the target, at its largest batch, cheapest first."""
    points: list[Plan]
    """Every layout at several batches, whatever their TPOT: for the front."""
    fastest: Plan | None
    """Least TPOT of all that fits; None: nothing fits."""
    short: tuple[Layout, str, float, float] | None
    """The layout that misses the memory least: (layout, role, bytes needed, bytes available)."""


class Searcher:
    """One model on the hardware, by name, that each role may use; colocated modes use what is in
    both. `acceptance` has the rates of drafts, as many as a target's `most_drafts`. With a `skew`
    of the experts' popularity they are placed as the engine places them; None:
    `Assumptions.imbalance`."""

    def __init__(
        self,
        calculator: Calculator,
        attention: Mapping[str, Hardware],
        ffn: Mapping[str, Hardware],
        acceptance: tuple[float, ...] = (),
        skew: Skew | None = None,
    ):
        self.skew = skew
        self.calculator = calculator
        self.memory = Memory(calculator, attention, ffn)
        self.attention, self.ffn = attention, ffn
        self.acceptance = acceptance
        self._counted = Counter(calculator.model.order)
        self._attend = functools.lru_cache(4096)(
            lambda group, on, *sizes: attend(calculator, group, attention[on], *sizes)
        )
        self._exchanged = functools.lru_cache(512)(
            lambda layout, ffn, rows: calculator.exchanged(
                *(layout, self.memory.on(layout), ffn, layout.dp * rows, rows),
                busiest=self._busiest(layout),
            )
        )
        self.host_seconds = functools.lru_cache(512)(
            lambda layout: calculator.host(layout, *self.memory.on(layout))
        )
        overlapped, skewed = calculator.assumed.overlapped, skew is not None
        layouts = Layouts(calculator.model, attention, ffn, skewed=skewed, overlapped=overlapped)
        self.layouts = layouts.of
        """Yields the layouts that are tried for a target, whether or not they fit."""

    def search(self, target: Target) -> Found:
        plans, points, lacking = [], list[Plan](), list[tuple[Layout, str, float, float]]()
        for layout in self.layouts(target):
            room = self.memory.room(layout)
            if room < 1:
                lack = self.memory.shortage(layout)
                lacking += [(layout, *lack)] if lack else []
                continue
            tried, best = self._batches(layout, room, target.tpot)
            points += tried
            plans += [best] if best else []
        plans.sort(key=lambda plan: (plan.dollars, plan.layout.devices))
        fastest = min(points, key=lambda plan: plan.tpot, default=None)
        short = min(lacking, key=lambda one: one[2] - one[3], default=None)
        return Found(plans, points, fastest, short)

    def _batches(self, layout: Layout, room: int, tpot: float) -> tuple[list[Plan], Plan | None]:
        """Returns plans of powers of two up to `room` and of `room`, until one misses the TPOT, and
        the plan of the largest batch that meets it."""
        evaluate = functools.cache(functools.partial(self.evaluate, layout))
        powers = [2**power for power in range(room.bit_length())]
        tried: list[Plan] = []
        for batch in powers if powers[-1] == room else [*powers, room]:
            tried.append(evaluate(batch))
            if tried[-1].tpot > tpot:
                break
        met = [plan.batch for plan in tried if plan.tpot <= tpot]
        if not met:
            return tried, None
        end = min(room, 2 * met[-1])
        return tried, evaluate(largest(lambda n: evaluate(n).tpot, met[-1], end, tpot))

    def with_memory(self, plan: Plan) -> Plan:
        attention, ffn = self.memory.kept(plan.layout, plan.batch)
        return msgspec.structs.replace(plan, attention_bytes=attention, ffn_bytes=ffn)

    def feasible(self, target: Target) -> bool:
        """Whether any layout meets the target with one sequence a DP group. One lane then needs the
        least time and memory."""
        return any(
            self.memory.fits(layout, 1) and self.evaluate(layout, 1).tpot <= target.tpot
            for layout in self.layouts(target)
            if layout.lanes == 1
        )

    def _busiest(self, layout: Layout) -> float | None:
        moe = self.calculator.model.moe
        if self.skew is None or moe is None or layout.ep == 1:
            return None
        return mean_busiest(self.skew, layout.slots(moe.experts))

    def evaluate(self, layout: Layout, batch: int) -> Plan:
        """Predicts a layout with a batch; whether it fits is not asked."""
        calculator, model = self.calculator, self.calculator.model
        a = self.attention[layout.attention]
        rows = 1 + layout.drafts
        kinds = self._kinds(layout, batch)
        step = sum(count * self._lanes_seconds(layout, stages) for count, stages in kinds)
        step += layout.lanes * calculator.head(a, batch * rows, layout.tp)
        if calculator.measured is not NOTHING:  # a step's first attend is a stage of its own
            asked = calculator, model.attention[0], a, layout.tp, batch, rows
            first, others = attend(*asked, "enter"), attend(*asked)
            step += layout.lanes * (first.seconds - others.seconds)
        step += self._drafts_seconds(layout, batch)
        gained = tokens_a_step(self.acceptance, layout.drafts)
        tpot = step / gained
        rate = layout.dp * layout.lanes * batch / tpot
        return Plan(
            layout=layout,
            batch=batch,
            tpot=tpot,
            stages=max(kinds, key=lambda kind: kind[0])[1],
            tokens_per_second=rate,
            dollars=layout.dollars(*self.memory.on(layout)) / 3600 / rate * 1e6,
            tokens_a_step=gained,
        )

    def _drafts_seconds(self, layout: Layout, batch: int) -> float:
        """Seconds of a step's passes of the module, all lanes. The first pass takes all tokens of a
        step, the others a token a sequence."""
        calculator, a = self.calculator, self.attention[layout.attention]
        seconds = 0.0
        for draft in range(layout.drafts):
            rows = 1 if draft else 1 + layout.drafts
            times = self._layer(layout, *calculator.model.modules[0], batch, rows)
            seconds += self._lanes_seconds(layout, times)
            of_lane = calculator.entrance(a, batch * rows)
            of_lane += calculator.head(a, batch, layout.tp)
            seconds += layout.lanes * of_lane
        return seconds

    def _lanes_seconds(self, layout: Layout, times: Mapping[str, StageTime]) -> float:
        """Seconds of a layer of all lanes. The host of either role works for each of them."""
        seconds = [times[name].seconds for name in STAGES]
        if layout.topology.has("colocated"):
            overlapped = layout.overlapped(self.calculator.assumed)
            return overlapped_seconds(seconds) if overlapped else layout.lanes * sum(seconds)
        return max(layer_seconds(seconds, layout.lanes), layout.lanes * self.host_seconds(layout))

    def balance(self, layout: Layout, batch: int) -> Balance:
        """Returns how long both roles of a layout take for a lane's step."""
        head = self.calculator.head(
            self.attention[layout.attention], batch * (1 + layout.drafts), layout.tp
        )

        def seconds(made: Layout, stage: AFDStage) -> float:
            return sum(count * times[stage].seconds for count, times in self._kinds(made, batch))

        doubled = msgspec.structs.replace(layout, dp=2 * layout.dp)
        return Balance(
            head + seconds(layout, "attend"), seconds(layout, "ffn"), seconds(doubled, "ffn")
        )

    def _kinds(self, layout: Layout, batch: int) -> list[tuple[int, dict[str, StageTime]]]:
        """The stages of a lane's layers of each kind, and how many layers are of that kind."""
        model, rows = self.calculator.model, 1 + layout.drafts
        return [
            (count, self._layer(layout, model.attention[a], model.ffn[f], batch, rows))
            for (a, f), count in self._counted.items()
        ]

    def _layer(
        self, layout: Layout, attention: AttentionLayers, ffn: FFNLayers, batch: int, rows: int
    ) -> dict[str, StageTime]:
        """Returns the stages of one layer and lane, which do not depend on the number of lanes.
        `batch` counts sequences of a DP group, with `rows` tokens each."""
        one = layout if layout.lanes == 1 else msgspec.structs.replace(layout, lanes=1)
        first = self._attend(attention, layout.attention, layout.tp, batch, rows)
        moved = self._exchanged(one, ffn, batch * rows)
        return dict(zip(STAGES, (first, *moved), strict=True))


class Pace:
    """Seconds between tokens of a layout whose sequences have unequal lengths.

    Every layer waits for the DP group whose sequences are longest together. So the mean-field rule,
    which takes each group for the mean one, has a barrier term (Song et al. 2026): the context is
    that of the largest of as many sums as groups.
    """

    def __init__(self, searcher: Searcher, layout: Layout, requests: Requests):
        self._searcher, self._layout, self._requests = searcher, layout, requests
        self.seconds = functools.cache(self._seconds)

    def longest(self, batch: int) -> Searcher:
        """Returns the search at the context of the group that all wait for."""
        requests, one = self._requests, self._searcher
        longer = largest_normal(self._layout.dp) * requests.context_spread / batch**0.5
        calculator = one.calculator._replace(context=round(requests.context + longer))
        return Searcher(calculator, one.attention, one.ffn, one.acceptance, one.skew)

    def _seconds(self, batch: int) -> float:
        return self.longest(batch).evaluate(self._layout, batch).tpot

    def drafts(self, batch: int) -> float:
        """Seconds a token with the layout's drafts over seconds a token without."""
        if not self._layout.drafts:
            return 1.0
        plain = msgspec.structs.replace(self._layout, drafts=0)
        evaluate = self._searcher.evaluate
        return evaluate(self._layout, batch).tpot / evaluate(plain, batch).tpot

    def largest(self, room: int, tpot: float) -> int:
        """Most sequences a DP group and lane within a time, up to `room`; 0: not even one."""
        return bisect_right(range(1, room + 1), tpot, key=self.seconds)


def layer_seconds(stages: Sequence[float], lanes: int) -> float:
    """Seconds per layer of one lane when `lanes` lanes share the roles.

    A lane takes at least the sum of its stages (attend, dispatch, ffn, combine), and at least as
    long as the slowest role needs for all lanes; both directions of the link are one stage, as in
    Step-3 §3.1. With three lanes of a balanced pipeline this is 3 · max(t_a, t_f, t_a2f + t_f2a).
    """
    attend, dispatch, ffn, combine = stages
    if lanes == 1:
        return sum(stages)
    return max(sum(stages), lanes * max(attend, ffn, dispatch + combine))


def overlapped_seconds(stages: Sequence[float]) -> float:
    """Seconds per layer of two batches of a colocated deployment, interleaved as in DeepSeek's
    decoding (profile-data, "Decoding"). While one batch attends, the rows of the other travel, both
    ways. While a batch is in the FFN nothing travels: its rows have arrived, and its results have
    not left. `Rooflines.step` leaves as much of messages."""
    attend, dispatch, ffn, combine = stages
    return 2 * (ffn + max(attend, dispatch + combine))


def front(points: Sequence[Plan]) -> list[Plan]:
    """The Pareto front of speed and cost, fastest first."""
    best: list[Plan] = []
    for plan in sorted(points, key=lambda plan: (plan.tpot, plan.dollars)):
        if not best or plan.dollars < best[-1].dollars:
            best.append(plan)
    return best


def why_not(searcher: Searcher, target: Target, found: Found) -> str:
    """Explains which bound prevents the target, and lists single changes that would meet it."""
    if plan := found.fastest:
        name, bound = plan.slowest
        parts = ("dispatch", "combine") if name == "link" else (name,)
        stage = sum(plan.stages[part].seconds for part in parts)
        text = (
            f"no layout reaches {target.tpot * 1e3:g} ms a token: the fastest, "
            f"{plan.layout.text}, takes {plan.tpot * 1e3:.1f} ms with one sequence a DP group; "
            f"its {name} stage takes {stage * 1e6:.0f} µs a layer, bound by {bound}"
        )
    elif found.short:
        layout, role, needed, there = found.short
        text = (
            f"nothing fits on up to {target.max_devices} devices: the nearest layout, "
            f"{layout.devices} devices, needs {needed / 1e9:.1f} GB on each of the {role} role's "
            f"(weights and one sequence a lane) and has {there / 1e9:.1f} GB: bound by memory size"
        )
    else:
        text = f"there is no layout of up to {target.max_devices} devices"
        text += f": {searcher.memory.refused}" if searcher.memory.refused else ""
        attention, ffn = (
            {one.platform for one in role.values()} for role in (searcher.attention, searcher.ffn)
        )
        if attention.isdisjoint(ffn):
            text += " of one platform: GPUs and TPUs do not serve together"
    changes = "; ".join(_changes(searcher, target, found))
    advice = f"what would meet it: {changes}" if changes else "no change of one thing meets it"
    return f"{text}\n  {advice}"


def _changes(searcher: Searcher, target: Target, found: Found) -> Iterator[str]:
    calculator, attention, ffn = searcher.calculator, searcher.attention, searcher.ffn

    def meets(calculator: Calculator, target: Target) -> bool:
        return Searcher(calculator, attention, ffn).feasible(target)

    for factor in (2, 4, 8):
        more = target.max_devices * factor
        if more <= 512 and meets(calculator, msgspec.structs.replace(target, max_devices=more)):
            yield f"up to {more} devices"
            break
    formats = calculator.formats
    for field in ("weights", "cache"):
        if getattr(formats, field) == "bfloat16":
            stored = all(h.stores("fp8") for h in (*attention.values(), *ffn.values()))
            name = "fp8" if stored else "int8"
            smaller = msgspec.structs.replace(formats, **{field: name})
            if meets(calculator._replace(formats=smaller), target):
                yield f"{field} in {name}"
    context = calculator.context
    while context > 256:
        context //= 2
        if meets(calculator._replace(context=context), target):
            yield f"a context of {context:,}"
            break
    if found.fastest is not None:
        yield f"a TPOT of {found.fastest.tpot * 1e3:.1f} ms"
