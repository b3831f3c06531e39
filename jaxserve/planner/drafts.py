"""What drafts of a multi-token-prediction module bring, and what they cost (xDeepServe §4.6).

Called by `search.py`. A step with k drafts feeds 1 + k tokens a sequence; the module is passed k
times: once over all of the step's tokens, then over one token a sequence.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.planner.assumptions import number_bytes
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.stages import Calculator


class Acceptance(msgspec.Struct, frozen=True):
    """How often the drafts of a step are accepted.

    Attributes:
      shares: of the first draft, of the second where the first was accepted, and so on.
    """

    shares: tuple[float, ...]

    def tokens(self, drafts: int) -> float:
        """Tokens that a sequence gets of a step with so many drafts."""
        return 1 + sum(itertools.accumulate(self.shares[:drafts], lambda a, b: a * b))


NO_DRAFTS = Acceptance(())


class Pass(NamedTuple):
    """One run of the module in a step."""

    batch: int
    """Sequences a DP group."""
    rows: int
    """Tokens of each."""


def passes(batch: int, drafts: int) -> Iterator[Pass]:
    """Those of a step."""
    for draft in range(drafts):
        yield Pass(batch, 1 if draft else 1 + drafts)


def entrance_seconds(calculator: Calculator, hardware: Hardware, rows: int) -> float:
    """Of the map of `[embedding, hidden]` to the module's input, on every device."""
    parameters, dtype = 2.0 * calculator.model.d_model**2, calculator.formats.rows
    work = [(number_bytes(dtype) * parameters, 2 * rows * parameters, dtype)]
    return calculator.kernels_seconds(hardware, work)


def entrance_bytes(calculator: Calculator) -> float:
    """Of that map on an attention device."""
    return 2.0 * calculator.model.d_model**2 * number_bytes(calculator.formats.rows)


def acceptance(text: str, most: int) -> Acceptance:
    """Reads `0.9`, the same for every draft, or `0.9,0.7`, one each.

    Args:
      most: drafts of a step.

    Raises:
      ConfigError: it is no list of shares, or too short.
    """
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ConfigError(f"--acceptance {text!r}: expected shares from 0 to 1, as in 0.9,0.7")
    if len(shares) == 1:
        return Acceptance(shares * most)
    if len(shares) < most:
        raise ConfigError(f"--acceptance {text!r}: {len(shares)} shares for {most} drafts")
    return Acceptance(shares)
