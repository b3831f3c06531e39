import json

import msgspec
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.planner.demand import Lengths
from jaxserve.planner.noise import ExpertLoads, Jitter, Skew, mean_busiest, rank_shares, read_skew
from tests import golden


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


class TestJitter:
    @pytest.mark.parametrize("spread", [{}, {"ffn": 0.3}])
    def test_a_stage_without_a_spread_is_unchanged(self, spread):
        seconds = np.array([1.0, 2.0])
        assert Jitter(spread=spread).draw(generator(), "attend", seconds) is seconds

    def test_mean_and_spread(self):
        drawn = Jitter(spread={"ffn": 0.3}).draw(generator(), "ffn", np.full(200_000, 2.0))
        assert drawn.mean() == pytest.approx(2.0, rel=0.01)
        assert drawn.std() / drawn.mean() == pytest.approx(0.3, rel=0.02)


class TestExpertLoads:
    def loads(self, spread: float, ranks: int = 8, **options) -> ExpertLoads:
        popularity = Skew("spread", spread).popularity(generator(), 2, 64)
        sizes = SlotSizes(64, ranks, options.pop("redundant", 0))
        return ExpertLoads(generator(), popularity, sizes, top_k=4, **options)

    def test_equal_experts_one_device_and_no_tokens(self):
        assert self.loads(0.0).busiest(1, 1_000_000) == pytest.approx(1.0, abs=0.01)
        assert self.loads(0.0).balance == pytest.approx(1.0)
        assert self.loads(1.0, ranks=1).busiest(1, 1000) == 1.0
        assert self.loads(0.0).busiest(1, 0) == 0.0

    def test_skew_and_few_tokens_make_a_device_busier(self):
        assert self.loads(1.0).busiest(1, 1_000_000) > 1.2
        assert self.loads(0.0).busiest(1, 8) > 1.2

    def test_ranks_that_do_not_divide_the_experts(self):
        """Ten on one of seven ranks, nine on the others."""
        assert self.loads(0.0, ranks=7).balance == pytest.approx(64 / 7 / 10)

    def test_a_rebalance_evens_out(self):
        home = self.loads(1.5)
        moved = self.loads(1.5, placed=True)
        more = self.loads(1.5, placed=True, redundant=1)
        assert home.balance < 0.8 < moved.balance < more.balance
        assert more.busiest(1, 1_000_000) == pytest.approx(1 / more.balance, rel=0.1)


class TestLengths:
    def test_without_spread_they_are_cut_to_the_longest(self):
        assert Lengths(prompt=10, output=5, longest=100).draw(generator()) == (10, 5)
        assert Lengths(prompt=10, output=50, longest=20).draw(generator()) == (10, 10)
        assert Lengths(prompt=99, output=50, longest=20).draw(generator()) == (19, 1)

    def test_means(self):
        random, lengths = generator(), Lengths(prompt=500, output=200, spread=0.5, longest=10**6)
        drawn = np.array([lengths.draw(random) for _ in range(20_000)])
        assert drawn.mean(axis=0) == pytest.approx([500, 200], rel=0.02)
        assert drawn.std(axis=0) == pytest.approx([250, 100], rel=0.05)

    def test_a_few_hundred_quantiles_have_the_mean_and_the_tail(self):
        lengths = Lengths(prompt=500, output=200, spread=0.5, longest=10**6)
        prompt, output = lengths.sample(generator(), 300)
        assert [prompt.mean(), output.mean()] == pytest.approx([500, 200], rel=0.005)
        # The 95th percentile: e^(1.645 sigma - sigma²/2) of the mean, with sigma² = ln 1.25
        assert np.percentile(prompt, 95) == pytest.approx(500 * 1.945, rel=0.03)
        assert abs(np.corrcoef(prompt, output)[0, 1]) < 0.15
        more, _ = msgspec.structs.replace(lengths, prompt=505).sample(generator(), 300)
        np.testing.assert_allclose(more / prompt, 1.01, atol=0.01)


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
    assert mean_busiest(skew, SlotSizes(16, 4)) == pytest.approx(4 * 25.5 / 37.5)
    assert mean_busiest(skew, SlotSizes(16, 4, 1)) < 1.15
