"""Activation of SwiGLU networks, as a value. Knows neither JAX nor models, so that configurations
can hold it; `grouped_matmul/reference.py` computes it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Activation:
    """`gate · sigmoid(alpha · gate) · (up + plus)`, of which a limit bounds both factors.

    Attributes:
      limit: largest value of the gate's factor, and of up's magnitude; 0: unlimited.
      clamp: `after`: the limit bounds gate · sigmoid(alpha · gate) (Step-3.5). `before`: it bounds
        the gate itself (gpt-oss).
      alpha: gain of the sigmoid.
      plus: number added to up, after its limit.
    """

    limit: float = 0.0
    clamp: Literal["after", "before"] = "after"
    alpha: float = 1.0
    plus: float = 0.0

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}, needs 0 or more")


SWIGLU = Activation()
"""silu(gate) · up, which kernels compute between their products."""
