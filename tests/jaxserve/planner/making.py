"""Layouts, calculators, searches and stage times, made from what a test of the planner is about."""

from typing import NamedTuple

import msgspec
import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.config.topology import PlannedMode
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import load_model
from jaxserve.planner.search import Searcher
from jaxserve.planner.stage_times import Rows, StepTimes
from jaxserve.planner.stages import Calculator

H100, H800 = load_hardware("h100"), load_hardware("h800")


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


def layout(mode: PlannedMode, hardware: str = "h800", **sizes: int) -> Layout:
    """A layout whose sizes are 1 unless given; colocated, `ep` is `dp`."""
    full = {"dp": 1, "tp": 1, "ffn_tp": 1, "lanes": 1} | sizes
    full = {"ep": 1 if mode == "afd" else full["dp"]} | full
    return Layout(mode=mode, attention=hardware, ffn=hardware, **full)


def deployment(
    lanes: int, slots: int, longest: int, page: int, budget: int, pages: int = 0, **sections: object
) -> Deployment:
    """A deployment with pages for all its sequences, of up to `longest` tokens, or with `pages`."""
    each = -(-longest // page)
    cache = {"page_size": page, "pages": pages or lanes * slots * (each + 2)}
    limits = {"slots": slots, "max_length": longest, "token_budget": budget}
    limits |= {"token_buckets": sorted({slots, budget}), "page_buckets": [each]}
    tree = {"model": "", "lanes": lanes, "cache": cache, "scheduler": limits} | sections
    return msgspec.convert(tree, Deployment)


def calculator(
    model: str = "step3", context: int = 4096, assumed: Assumptions | None = None, **formats: object
) -> Calculator:
    return Calculator(load_model(model), context, Formats(**formats), assumed or Assumptions())


def searcher(
    model: str = "step3",
    hardware: str = "h800",
    *,
    context: int = 4096,
    assumed: Assumptions | None = None,
    acceptance: tuple[float, ...] = (),
    **formats: object,
) -> Searcher:
    """A search over layouts of this hardware, or of several kinds divided by spaces."""
    named = {each: load_hardware(each) for each in hardware.split()}
    return Searcher(calculator(model, context, assumed, **formats), named, named, acceptance)


class Given:
    """Stage times that are the same whatever the batch: a paper's, or a formula's."""

    def __init__(self, *, layers: int, groups: int, leave: float = 0.0, **s: float):
        self.layers = layers
        there, work, back = (np.full(layers, s[one]) for one in ("dispatch", "ffn", "combine"))
        attend = np.full((layers, groups), s["attend"])
        self._times = StepTimes(attend, there, work, back, leave, s.get("host", 0.0), (0, 0.25))

    def step(self, rows: Rows | None = None) -> StepTimes:
        """The given ones."""
        return self._times
