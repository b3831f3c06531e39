"""Published figures beside ours, as `paper_systems.py` and `paper_deployments.py` print them."""

import inspect
import sys
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.planner.view import grid, json_text


class Compared(NamedTuple):
    """One published figure beside ours."""

    system: str
    quantity: str
    published: float
    ours: float

    @property
    def error(self) -> float:
        """(ours − published) / published."""
        return self.ours / self.published - 1


def show(*comparisons: Callable[[], list[Compared]]) -> None:
    """Prints comparisons, for people (then with their docstrings) or (`--json`) for programs."""
    found = [one for comparison in comparisons for one in comparison()]
    if "--json" in sys.argv:
        print(json_text([one._asdict() for one in found]))
        return
    rows = [["", "", "published", "ours", "error"]]
    rows += [
        [one.system, one.quantity, f"{one.published:g}", f"{one.ours:.4g}", f"{one.error:+.1%}"]
        for one in found
    ]
    print(grid(rows), *map(inspect.getdoc, comparisons), sep="\n\n")
