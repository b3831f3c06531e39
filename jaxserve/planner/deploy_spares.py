"""Spare servers, by number or by how often servers fail. Called by `deploy.py`."""

import math
import re
from statistics import NormalDist

import msgspec

from jaxserve.errors import ConfigError


class Spares(msgspec.Struct, frozen=True, kw_only=True):
    """What stands by. A unit or worker that loses a server stands still until it has another.

    Attributes:
      count: servers of every role; with `between` those that failures ask for, at least.
      between: hours from one failure of a server to its next, on the mean; 0: none are looked at.
      repair: hours that a failed server is away.
      share: of the time in which there are enough.
    """

    count: int = 0
    between: float = 0.0
    repair: float = 0.0
    share: float = 0.999

    def hosts(self, used: int) -> int:
        """Spare servers of a role that uses so many: failed ones at a moment are Poisson's."""
        if not self.between or not used:
            return self.count if used else 0
        away = used * self.repair / (self.between + self.repair)
        if away > 500:  # where e^-away has no digits left, Poisson's numbers are normal
            failed = math.ceil(away + NormalDist().inv_cdf(self.share) * away**0.5)
            return max(self.count, min(used, failed))
        chance = total = math.exp(-away)
        failed = 0
        while total < self.share and failed < used:
            failed += 1
            chance *= away / failed
            total += chance
        return max(self.count, failed)

    @property
    def text(self) -> str:
        """In a few words."""
        if self.between:
            return (
                f"a server fails every {self.between:g} h and is away for {self.repair:g} h; "
                f"enough of them stand by in {self.share:.1%} of the time"
            )
        return f"{self.count} servers of every role, as asked" if self.count else "none asked for"


def spares(count: int, failures: str) -> Spares:
    """Of the options: a number of servers, and `1000h:12h`, from failure to failure and away.

    Raises:
      ConfigError: they are something else.
    """
    if not 0 <= count <= 4096:
        raise ConfigError(f"--spares {count}: expected 0 to 4096 servers of every role")
    if not failures:
        return Spares(count=count)
    match = re.fullmatch(r"\s*([0-9.]+)h:([0-9.]+)h\s*", failures)
    try:
        between, repair = (float(part) for part in match.groups()) if match else (0.0, 0.0)
    except ValueError:
        between = repair = 0.0
    if not 0 < repair <= between:
        raise ConfigError(
            f"--failures {failures!r}: expected hours between a server's failures, and those that "
            "it is away, as in 1000h:12h"
        )
    return Spares(count=count, between=between, repair=repair)
