"""Steps of both roles as one program give the colocated tokens."""

import pytest

from tests.jaxserve import layouts

pytestmark = pytest.mark.unoptimised

CASES = [
    (1, {}),
    (2, {}),
    (3, {}),
    (3, {"attention.dp": 2, "ffn.ep": 2}),
    (2, {"attention.tp": 2, "ffn.tp": 2}),
    (4, {"attention.dp": 2, "ffn.ep": 2, "ffn.exchange": "alltoall"}),
]


@pytest.mark.parametrize(("lanes", "sizes"), CASES)
def test_tokens(lanes, sizes, tiny_model, reference):
    overrides = {"pipeline": "step", "lanes": lanes, "ffn.exchange": "gather"} | sizes
    with layouts.running(tiny_model, overrides) as engine:
        tokens = layouts.generate(engine)
    layouts.check(reference, tokens, sizes)
