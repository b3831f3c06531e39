"""Memory of a layout's devices, and the sequences that fit: what `serve --check` counts of the
deployment that the layout is written as (`layout_keys.py`, `roles/pipelines.py`).
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig, platform_of
from jaxserve.errors import ConfigError
from jaxserve.model.ffn.traffic import exchange_of
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layout_keys import (
    deployment_of_layout,
    layout_keys,
    sections,
    sized_keys,
    usable,
)
from jaxserve.planner.layouts import Layout
from jaxserve.planner.stages import Calculator

if TYPE_CHECKING:
    from jaxserve.roles.capacity import RoleBytes

KEPT = 0.25
"""Least part of a prefill worker's memory that is left for pages."""
USED = 0.95
"""Part of what one prompt leaves free that becomes further pages."""
MOST = 2**17
"""Sequences of a DP group and lane that are asked about at most."""
STRAIGHT = 2
"""Interpolated guesses in a row. The next guess is the middle, where a value grows in jumps."""


class Memory:
    """Memory of layouts on hardware, by name, with the calculator's model, context and formats."""

    def __init__(
        self,
        calculator: Calculator,
        attention: Mapping[str, Hardware],
        ffn: Mapping[str, Hardware],
    ):
        self._calculator, self._attention, self._ffn = calculator, attention, ffn
        self._reserve = calculator.assumed.reserve
        self._of_attention = functools.lru_cache(2**16)(self._attention_bytes)
        self._attention_room = functools.lru_cache(2**12)(
            functools.partial(self._room, most=MOST, alone=True)
        )
        self._configs = functools.cache(self._config_on)
        self._written = functools.lru_cache(2**10)(
            lambda layout: deployment_of_layout(layout_keys(calculator, layout, self.on(layout), 1))
        )
        self._attention_weights = dict[object, int]()
        self._ffn_parts: dict[object, RoleBytes] = {}
        self.refused = ""
        """Why the engine cannot divide the model as the last such layout asked; empty: it can."""

    def on(self, layout: Layout) -> tuple[Hardware, Hardware]:
        """Hardware of attention and of the FFN, the same in a colocated layout."""
        attention = self._attention[layout.attention]
        return attention, self._ffn.get(layout.ffn, attention)

    def held(
        self, layout: Layout, batch: int, budget: int = 0, length: int = 0
    ) -> list["RoleBytes"]:
        """Returns the bytes on a device of either role, or of a colocated layout's mesh, for
        `batch` sequences of a DP group and lane, a `budget` of tokens in its largest step and a
        longest sequence of `length` tokens (0: as written). Raises ConfigError if the engine cannot
        divide it so."""
        from jaxserve.roles.pipelines import on_one_mesh  # imports JAX

        attention = self._of_attention(_attention_alone(layout), batch, budget, length)
        attention = attention._replace(devices=layout.attention_devices)
        ffn = self._ffn_bytes(layout, self._deployment(layout, batch, budget, length))
        if layout.topology.has("colocated"):
            return [on_one_mesh(attention, ffn)]
        return [attention, ffn]

    def kept(self, layout: Layout, batch: int) -> tuple[int, int]:
        """Bytes of weights and cache on an attention and an ffn device (colocated: 0)."""
        attention, *ffn = map(_kept, self.held(layout, batch))
        return attention, sum(ffn)

    def fits(self, layout: Layout, batch: int) -> bool:
        """Whether `batch` sequences of each DP group and lane fit."""
        return self._filled(layout, batch) <= 1

    def _filled(self, layout: Layout, batch: int, *, alone: bool = False) -> float:
        """The part of its memory that the fuller role needs, or attention `alone`, as
        `_attention_alone` makes it; infinite where the engine cannot divide the model like that."""
        try:
            parts = [self._of_attention(layout, batch, 0, 0)] if alone else self.held(layout, batch)
        except ConfigError as error:
            self.refused = str(error)
            return math.inf
        return max(map(self._filled_by, parts, self.on(layout)))

    def _filled_by(self, part: "RoleBytes", hardware: Hardware) -> float:
        """The part of a device's memory: of what the reserve leaves to weights and cache, or, with
        a step's activations, of what half of the reserve leaves."""
        reserve = self._reserve
        kept = _kept(part) / (hardware.memory * (1 - reserve))
        return max(kept, part.total / usable(hardware, reserve))

    def room(self, layout: Layout) -> int:
        """Sequences of a DP group and lane that fit; 0: not even one."""
        return self._room(layout, self._attention_room(_attention_alone(layout)))

    def _room(self, layout: Layout, most: int, *, alone: bool = False) -> int:
        """`room` up to a number; `alone` as in `_filled`."""
        filled = functools.cache(functools.partial(self._filled, layout, alone=alone))
        return largest(filled, 1, most, 1.0) if most and filled(1) <= 1 else 0

    def tokens(self, layout: Layout, slots: int, budget: int, length: int) -> int:
        """Cached tokens of a DP group of a colocated layout that computes `slots` prompts at a
        time; 0: weights leave too little. `budget` and `length` as in `held`."""
        hardware, reserve = self.on(layout)[0], self._reserve
        try:
            held, more = (self.held(layout, slots, budget, n * length)[0] for n in (1, 2))
        except ConfigError:
            return 0
        beside = hardware.memory * (1 - reserve)
        free = min(beside - _kept(held), usable(hardware, reserve) - held.total)
        if free < 0 or beside - held.weights < KEPT * hardware.memory:
            return 0
        return length + int(USED * free * length / max(1, more.cache - held.cache))

    def shortage(self, layout: Layout) -> tuple[str, float, float] | None:
        """(role, bytes that one sequence takes there, available bytes) for the role that has too
        few, or for attention; None: the engine cannot divide the model like that."""
        try:
            attention, *ffn = zip(self.held(layout, 1), self.on(layout), strict=False)
        except ConfigError:
            return None
        part, hardware = next((one for one in ffn if self._filled_by(*one) > 1), attention)
        there = hardware.memory * (1 - self._reserve)
        if _kept(part) > there:
            return part.role, _kept(part), there
        return part.role, part.total, usable(hardware, self._reserve)

    def _attention_bytes(self, layout: Layout, batch: int, budget: int, length: int) -> "RoleBytes":
        from jaxserve.roles.attention_bytes import attention_bytes, attention_weights

        deployment = self._deployment(layout, batch, budget, length)
        config, _ = self._configs(self.on(layout)[1].platform, deployment.modules)
        key = layout.attention, layout.tp, deployment.modules
        if key not in self._attention_weights:
            self._attention_weights[key] = attention_weights(config, deployment)
        return attention_bytes(config, deployment, self._attention_weights[key])[0]

    def _ffn_bytes(self, layout: Layout, deployment: Deployment) -> "RoleBytes":
        """Bytes on an ffn device, whose weights depend on attention by the exchange alone."""
        from jaxserve.roles.ffn_bytes import ffn_bytes, pass_activations

        config, short = self._configs(self.on(layout)[1].platform, deployment.modules)
        step, mesh = pass_activations(short, deployment), layout.ffn_mesh
        split, exchange = mesh.attention is not None, exchange_of(short, deployment)
        key = (
            *(mesh._replace(attention=None), split, exchange),
            *(layout.ffn, layout.redundant_slots, deployment.modules),
        )
        if key not in self._ffn_parts:
            (part,) = ffn_bytes(config, deployment)
            self._ffn_parts[key] = part._replace(activations=part.activations - step)
        part = self._ffn_parts[key]
        return part._replace(activations=part.activations + step)

    def _deployment(self, layout: Layout, batch: int, budget: int, length: int) -> Deployment:
        """The deployment that a layout is written as, whose other keys are read once."""
        keys = sized_keys(self._calculator, layout, self.on(layout)[0], batch)
        if budget:
            keys["scheduler.token_budget"] = budget
        if length:
            keys["scheduler.max_length"] = length
            keys["cache.pages"] = -(-length // keys["cache.page_size"])
        whole, replace = self._written(layout), msgspec.structs.replace
        sized = {name: replace(getattr(whole, name), **own) for name, own in sections(keys).items()}
        return replace(whole, **sized)

    def _config_on(self, platform: str, modules: int) -> tuple[ModelConfig, ModelConfig]:
        """The model as a deployment loads it, and with one layer of each kind for a step."""
        told = {"platform": platform_of(platform), "modules": modules}
        config = msgspec.structs.replace(self._calculator.model.config, **told)
        return config, msgspec.structs.replace(config, decoder=tuple(config.kinds()), modules=0)


def _kept(part: "RoleBytes") -> int:
    return part.weights + part.cache + part.rings


def _attention_alone(layout: Layout) -> Layout:
    """A layout whose attention devices hold what those of this one hold."""
    alone = {"dp": 1, "ep": 1, "ffn_tp": 1, "redundant_slots": 0, "shared_ranks": 0}
    return msgspec.structs.replace(layout, **alone)


def largest(value: Callable[[int], float], low: int, high: int, bound: float) -> int:
    """Returns the largest number with a value within `bound`, as `low` has; values never fall."""
    at_low, at_high, guesses = value(low), value(high), 0
    if at_high <= bound:
        return high
    while high - low > 1:
        guesses += 1
        share = (bound - at_low) / (at_high - at_low) if guesses % (STRAIGHT + 1) else 0.5
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        there = value(middle)
        if there <= bound:
            low, at_low = middle, there
        else:
            high, at_high = middle, there
    return low
