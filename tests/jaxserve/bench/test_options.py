"""The words of the bench; its loops run in `test_serving_options.py`'s engine as others do."""

import numpy as np
import pytest

from jaxserve.bench.options import EveryOther, part_of

SAMPLES = {
    "first_token_seconds": {"cold": [0.9, 0.8], "shared": [0.1, 0.3]},
    "tokens_per_second": {
        "plain": [100.0, 80.0],
        "grammars": [50.0, 90.0],
        "half grammars": [80.0, 70.0],
        "penalties": [99.0, 98.0],
        "biases": [1.0, 97.0],
        "5 logprobs": [96.0, 2.0],
    },
    "compilations": 0,
}


def test_the_best_round_counts_and_targets_are_those_of_the_issue():
    part = part_of({"1A1F": SAMPLES}, rounds=2)
    found = {measure.name.strip(): (measure.value, measure.met) for measure in part.measures}
    assert found["1A1F: first token, cold ÷ shared"] == (pytest.approx(8.0), True)
    assert found["grammars ÷ plain"] == (pytest.approx(0.9), True)
    assert found["half grammars ÷ plain"] == (pytest.approx(0.8), False)
    assert found["biases ÷ plain"] == (pytest.approx(0.97), None)
    assert found["compiled after ready"] == (0, True)


def test_even_and_odd_by_turns():
    grammar = EveryOther(70)
    assert grammar.mask().shape == (3,)
    assert [bit for bit in range(8) if grammar.mask()[0] >> np.uint32(bit) & 1] == [0, 2, 4, 6]
    grammar.accept(4)
    assert [bit for bit in range(8) if grammar.mask()[0] >> np.uint32(bit) & 1] == [1, 3, 5, 7]
    with pytest.raises(ValueError, match="token 4 is not allowed"):
        grammar.accept(4)
