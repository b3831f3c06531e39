"""Memory of a layout's devices (weights, cache, a step's activations) and the sequences that fit.

Activations come from `roles/activations.py`, by which `serve` refuses a deployment, so that `serve`
accepts every plan. Weights are sums by formula: the engine's templates need JAX, take a second a
layout, and do not know models that can only be planned. Both agree within `TEMPLATES`.
"""

import functools
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.config.model import FFN
from jaxserve.planner.assumptions import number_bytes
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Layout
from jaxserve.planner.stages import Calculator
from jaxserve.roles.activations import (
    StepSizes,
    attention_activations,
    ffn_activations,
    head_width,
    shared_width,
)

TEMPLATES = 0.005
"""Share of the weights that their sum by formula may lack."""
MOST_TOKENS = 65536
"""Most tokens of a DP group's step."""


class RoleMemory(NamedTuple):
    """Bytes on a device of a role."""

    weights: float = 0.0
    cache: float = 0.0
    activations: int = 0
    """Activations of the largest step."""
    moving: float = 0.0
    """Room for an expert on its way."""

    @property
    def step(self) -> float:
        """Bytes of the largest step and of moving experts."""
        return self.activations + self.moving

    def fits(self, hardware: Hardware, reserve: float) -> bool:
        """Whether weights and cache leave the reserve free, and the step half of the reserve."""
        kept = self.weights + self.cache
        whole = kept + TEMPLATES * self.weights + self.step
        return bool(kept <= hardware.memory * (1 - reserve) and whole <= usable(hardware, reserve))


def usable(hardware: Hardware, reserve: float) -> float:
    """Bytes that a deployment may fill: written as `memory_gb`, in tenths of a GB."""
    return round(hardware.memory_gb * (1 - reserve / 2), 1) * 1e9


def token_budget(batch: int, drafts: int) -> int:
    """Tokens of a DP group's largest step: every sequence's, and some of prompts."""
    return min(batch * (1 + drafts) + max(batch, 128), MOST_TOKENS)


class _Fixed(NamedTuple):
    """Sizes of a layout that do not depend on the batch."""

    roles: tuple[RoleMemory, ...]
    """Weights, and room for an expert on its way."""
    sequence: float
    """Bytes of a sequence's cache."""
    kinds: dict[FFN, bool]
    """See `ffn_activations`."""


class Memory:
    """Memory of layouts on hardware.

    Args:
      calculator: the model, its context and formats.
      attention, ffn: hardware by name.
    """

    def __init__(
        self,
        calculator: Calculator,
        attention: Mapping[str, Hardware],
        ffn: Mapping[str, Hardware],
    ):
        self._calculator, self._attention, self._ffn = calculator, attention, ffn
        self._reserve = calculator.assumed.reserve
        self._drafting = calculator._replace(model=calculator.model.with_module())
        self._fixed = functools.lru_cache(maxsize=1)(self._sum_up)

    def on(self, layout: Layout) -> tuple[Hardware, Hardware]:
        """Hardware of attention and of the FFN, the same in a colocated layout."""
        attention = self._attention[layout.attention]
        return attention, self._ffn.get(layout.ffn, attention)

    def held(self, layout: Layout, batch: int, budget: int = 0) -> tuple[RoleMemory, ...]:
        """Memory of the attention and the ffn role, or of the one mesh of a colocated layout.

        Args:
          batch: sequences of a DP group and lane.
          budget: tokens of a DP group's largest step; 0: `token_budget`.
        """
        fixed, step = self._fixed(layout), self._step_sizes(layout, batch, budget)
        attending = max(
            attention_activations(
                step, spec.q_heads, layout.tp, head_width(spec), shared_width(spec)
            )
            for spec in (group.spec for group in self._calculator.model.attention)
        )
        pieces = layout.attention_devices
        multiplying = ffn_activations(step, layout.ffn_mesh, layout.dp, pieces, fixed.kinds)
        attention, *ffn = fixed.roles
        attention = attention._replace(
            cache=layout.lanes * batch * fixed.sequence,
            activations=attending if ffn else attending + multiplying,
        )
        return attention, *(part._replace(activations=multiplying) for part in ffn)

    def kept(self, layout: Layout, batch: int) -> tuple[float, float]:
        """Bytes of weights and cache on a device of the attention role, and of the ffn role; 0 for
        the latter, if colocated."""
        fixed = self._fixed(layout)
        attention, ffn, *_ = *fixed.roles, RoleMemory()
        return attention.weights + layout.lanes * batch * fixed.sequence, ffn.weights

    def fits(self, layout: Layout, batch: int) -> bool:
        """Whether `batch` sequences of each DP group and lane fit."""
        parts = zip(self.held(layout, batch), self.on(layout), strict=False)
        return all(part.fits(hardware, self._reserve) for part, hardware in parts)

    def room(self, layout: Layout) -> int:
        """Sequences of a DP group and lane that fit; 0: not even one."""
        weights, _ = self.kept(layout, 0)
        one = self.kept(layout, 1)[0] - weights
        there = self._attention[layout.attention].memory * (1 - self._reserve)
        most = int((there - weights) // one)
        if most < 1 or self.fits(layout, most):  # activations rarely need more than is kept free
            return max(0, most)
        return bisect_left(range(1, most), True, key=lambda n: not self.fits(layout, n))

    def shortage(self, layout: Layout) -> tuple[str, float, float]:
        """(role, bytes that one sequence takes there, available bytes) for the role that has too
        few, or for attention."""
        names = ("attention", "ffn")
        attention, *ffn = zip(names, self.held(layout, 1), self.on(layout), strict=False)
        lacking = [one for one in ffn if not one[1].fits(one[2], self._reserve)]
        name, part, hardware = lacking[0] if lacking else attention
        kept, there = part.weights + part.cache, hardware.memory * (1 - self._reserve)
        if kept > there:
            return name, kept, there
        return name, kept + part.step, usable(hardware, self._reserve)

    def _sum_up(self, layout: Layout) -> _Fixed:
        # With drafts, weights and cache of the module count, too.
        calculator = self._drafting if layout.drafts else self._calculator
        mesh, model, (_, hardware) = layout.ffn_mesh, calculator.model, self.on(layout)
        moving = 0.0
        if mesh.routed > 1 and model.moe is not None:
            expert = 3 * model.d_model * model.moe.expert_d_ff / mesh.tensor
            moving = expert * calculator.formats.weight_bytes
        kinds = {
            group.spec: calculator.exchange_kind(group, mesh, hardware) == "alltoall"
            for group in model.ffn
        }
        entrance = calculator.entrance_bytes if layout.drafts else 0.0
        attention = calculator.attention_weights(layout.tp) + entrance
        ffn = calculator.ffn_weights(mesh, hardware, layout.redundant_slots)
        roles: tuple[RoleMemory, ...] = (RoleMemory(attention + ffn, moving=moving),)
        if layout.topology.has("ffn"):
            roles = RoleMemory(attention), RoleMemory(ffn, moving=moving)
        return _Fixed(roles, calculator.sequence_bytes(layout.tp), kinds)

    def _step_sizes(self, layout: Layout, batch: int, budget: int) -> StepSizes:
        calculator = self._calculator
        tokens = budget or token_budget(batch, layout.drafts)
        if layout.topology.has("ffn"):  # all pieces of a message are equal
            tokens = -(-tokens // layout.tp) * layout.tp
        return StepSizes(
            tokens=tokens,
            slots=batch,
            lanes=layout.lanes,
            drafts=layout.drafts,
            d_model=calculator.model.d_model,
            vocab=calculator.model.vocab,
            packed=calculator.dispatch_bytes(),
            size=number_bytes(calculator.formats.rows),
        )
