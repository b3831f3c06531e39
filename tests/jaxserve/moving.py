"""Experts that are moved at random while requests run. Used by the tests of moves."""

import random
import time

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams
from jaxserve.model.ffn.move_rounds import aligned
from tests.jaxserve.layouts import Collector
from tests.jaxserve.model.ffn.test_placement import random_placement


def move_at_random(
    engine: Engine,
    prompts: list[list[int]],
    params: SamplingParams,
    expected: list[list[int]],
    times: int,
) -> None:
    """Runs the prompts, whose tokens have to be the expected ones, until the experts of all layers
    have been sent to so many random placements."""
    balancer, draw, done = engine.experts, random.Random(0), 0
    assert balancer is not None
    sizes = balancer.facts.sizes
    while done < times:
        collector = Collector()
        for prompt in prompts:
            collector.submit(engine, prompt, params)
        while collector._open:
            if not balancer.view().moving:
                now = balancer.placements
                wanted = {layer: random_placement(draw, sizes) for layer in now}
                targets = {n: aligned(now[n], wanted[n], sizes.ranks) for n in wanted}
                done += balancer.place(targets) > 0
            time.sleep(0.001)
        assert [output.token_ids for output in collector.wait().values()] == expected
