"""Experts that move while requests run: same tokens, no compilation, no failed request."""

import random
import threading
from typing import Any

import pytest

from jaxserve.engine.request import SamplingParams
from jaxserve.fleet.assembly import open_engine
from jaxserve.roles.held_weights import HeldWeights
from tests.jaxserve import layouts
from tests.jaxserve.moving import move_at_random
from tests.jaxserve.waiting import until

pytestmark = pytest.mark.unoptimised

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = layouts.PROMPTS[:8]
RECONFIGURATIONS = [8, pytest.param(25, marks=pytest.mark.nightly)]
"""Rounds of moves of each layout. Two meshes: `test_shared_ranks.py`, too."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "AFD, gather": {"attention.dp": 2, "ffn.ep": 3},
    "colocated, alltoall": {"attention.dp": 4, "mode": "colocated", "pipeline": "step"},
}


@pytest.mark.parametrize("times", RECONFIGURATIONS)
@pytest.mark.parametrize(
    "layout", [pytest.param("AFD, gather", marks=pytest.mark.nightly), "colocated, alltoall"]
)
def test_tokens_are_the_same_through_all_reconfigurations(layout, times, tiny_model):
    """And so is what other workers read of them meanwhile."""
    overrides = {"ffn.redundant_slots": 1, "lanes": 2, "experts.move_gb_per_second": 1000.0}
    overrides |= LAYOUTS[layout] | {"ffn.exchange": layout.split()[1]}
    engine = open_engine(layouts.deployment(tiny_model, overrides))
    readers = Readers(HeldWeights(engine.driver.held(), engine.driver.slots))
    try:
        expected = layouts.generate(engine, PROMPTS, PARAMS)
        move_at_random(engine, PROMPTS, PARAMS, expected, times)
        balancer = engine.experts
        until(lambda: not balancer.view().moving)
        assert readers.end() > times
        assert layouts.generate(engine, PROMPTS, PARAMS) == expected
        assert engine.driver.slots.placements == balancer.placements
        assert balancer.view().moves > 2 * times
        assert engine.compilations_after_ready == 0
    finally:
        readers.end()
        engine.close()


class Readers:
    """Reads experts at random, from a thread of its own, and compares with what they were."""

    def __init__(self, held: HeldWeights):
        self._held, self._reads, self._wrong = held, 0, []
        self._parts = [
            (block, leaf, ((expert, expert + 1), *((0, size) for size in array.shape[1:])))
            for block, leaves in held.held().items()
            for leaf, array in leaves.items()
            if array.apart
            for expert in range(array.shape[0])
        ]
        self._expected = [held.read(*part).tobytes() for part in self._parts]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """How many were read; fails if one of them was something else."""
        self._ending.set()
        self._thread.join(30.0)
        assert not self._wrong
        return self._reads

    def _run(self) -> None:
        draw = random.Random(4)
        while not self._ending.wait(0.005):
            number = draw.randrange(len(self._parts))
            if self._held.read(*self._parts[number]).tobytes() != self._expected[number]:
                self._wrong.append(self._parts[number])
            self._reads += 1
