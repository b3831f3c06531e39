"""Published figures beside ours, as `paper_systems.py` and `paper_deployments.py` print them."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.planner.text import grid, json_text


class Compared(NamedTuple):
    """One published figure beside ours."""

    system: str
    quantity: str
    published: float
    ours: float
    told: str
    """The inputs, and where each is from."""

    @property
    def error(self) -> float:
        """(ours − published) / published."""
        return self.ours / self.published - 1


def show(found: Sequence[Compared]) -> None:
    """Prints a comparison, for people or (`--json`) for programs."""
    if "--json" in sys.argv:
        print(json_text([one._asdict() for one in found]))
        return
    rows = [["", "", "published", "ours", "error"]]
    rows += [
        [one.system, one.quantity, f"{one.published:g}", f"{one.ours:.4g}", f"{one.error:+.1%}"]
        for one in found
    ]
    print(grid(rows))
    for told in dict.fromkeys((one.system, one.told) for one in found):
        print(": ".join(told))
