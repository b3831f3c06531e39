import json

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.planner.skew import Skew, mean_busiest, rank_shares, read_skew
from tests import golden


def popularity(skew, layers=3, experts=4):
    return skew.popularity(np.random.default_rng(0), layers, experts)


def test_synthetic():
    zipf = popularity(read_skew("zipf:1"))
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4
    for row in zipf:
        np.testing.assert_allclose(sorted(row), sorted(1 / n / harmonic for n in range(1, 5)))
    assert popularity(read_skew("0")) == pytest.approx(np.full((3, 4), 0.25))
    many = popularity(read_skew("0.5"), 50, 1000)
    assert (many.std(axis=1) / many.mean(axis=1)).mean() == pytest.approx(0.5, rel=0.03)


@golden.table("planner/counts_of_a_server.yaml")
def test_counts_of_a_server(tree, tmp_path):
    """A layer that was not counted has the counts of one that was."""
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(tree))
    found = popularity(read_skew(str(file)), layers=4).tolist()
    busy, even = [0.75, 0.25, 0, 0], [0.25] * 4
    assert found == [busy, busy, busy, even]


def test_what_is_none_of_these(tmp_path):
    for text in ("much", "zipf:much", "101", "-1", "zipf:"):
        with pytest.raises(ConfigError, match="expected a spread from 0 to 100, zipf:EXPONENT"):
            read_skew(text)
    file = tmp_path / "counts.json"
    for text in ("{}", "[]", '{"1": [0, 0]}', '{"a": [1]}', '{"1": [-1, 5]}', "{"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="no counts of experts by layer"):
            read_skew(str(file))
    file.write_text('{"1": [1, 2, 3]}')
    with pytest.raises(ConfigError, match="counts of 3 experts, the model has 4"):
        popularity(read_skew(str(file)))


def test_shares_of_replicas():
    shares = rank_shares((0, 1, 0, -1, 2, 0), SlotSizes(3, 3, 1))
    third = 1 / 3
    np.testing.assert_allclose(shares, [[third, third, third], [1, 0, 0], [0, 0, 1]])


def test_redundancy_helps_where_one_expert_has_more_than_a_rank_should():
    """The first of 16 has 60 % of the tokens, the others the same."""
    skew = Skew("counts", counts=((0, (22.5, *(1.0,) * 15)),))
    assert mean_busiest(skew, SlotSizes(16, 4), placed=False) == pytest.approx(4 * 25.5 / 37.5)
    assert mean_busiest(skew, SlotSizes(16, 4)) == pytest.approx(4 * 25.5 / 37.5)
    assert mean_busiest(skew, SlotSizes(16, 4, 1)) < 1.15
