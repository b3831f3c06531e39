import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.planner.noise import ExpertLoads, Jitter, Lengths


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


class TestJitter:
    def test_none_changes_nothing(self):
        seconds = np.array([1.0, 2.0])
        assert Jitter().draw(generator(), "attend", seconds) is seconds

    def test_mean_and_spread(self):
        drawn = Jitter(spread={"ffn": 0.3}).draw(generator(), "ffn", np.full(200_000, 2.0))
        assert drawn.mean() == pytest.approx(2.0, rel=0.01)
        assert drawn.std() / drawn.mean() == pytest.approx(0.3, rel=0.02)

    def test_only_the_stages_that_have_a_spread(self):
        seconds = np.ones(3)
        assert Jitter(spread={"ffn": 0.3}).draw(generator(), "attend", seconds) is seconds

    def test_stalls_are_as_rare_as_asked(self):
        jitter = Jitter(stall_probability=0.01, stall_seconds=5.0)
        drawn = jitter.draw(generator(), "combine", np.ones(100_000))
        assert set(drawn) == {1.0, 6.0}
        assert (drawn == 6.0).mean() == pytest.approx(0.01, rel=0.1)


class TestExpertLoads:
    def loads(self, skew: float, ranks: int = 8, tokens: int = 1_000_000) -> float:
        loads = ExpertLoads(generator(), layers=2, experts=64, top_k=4, ranks=ranks, skew=skew)
        return loads.busiest(1, tokens)

    def test_many_tokens_over_experts_that_are_all_alike(self):
        assert self.loads(0.0) == pytest.approx(1.0, abs=0.01)

    def test_one_device_has_everything(self):
        assert self.loads(1.0, ranks=1) == 1.0

    def test_skew_and_few_tokens_make_a_device_busier(self):
        assert self.loads(1.0) > 1.2
        assert self.loads(0.0, tokens=8) > 1.2

    def test_no_tokens(self):
        assert self.loads(0.0, tokens=0) == 0.0

    def test_experts_that_do_not_divide(self):
        with pytest.raises(ConfigError, match="64 experts do not divide over ep = 7"):
            self.loads(0.0, ranks=7)


class TestLengths:
    def test_without_spread(self):
        assert Lengths(prompt=10, output=5, longest=100).draw(generator()) == (10, 5)

    def test_cut_to_the_longest(self):
        assert Lengths(prompt=10, output=50, longest=20).draw(generator()) == (10, 10)
        assert Lengths(prompt=99, output=50, longest=20).draw(generator()) == (19, 1)

    def test_means(self):
        random, lengths = generator(), Lengths(prompt=500, output=200, spread=0.5, longest=10**6)
        drawn = np.array([lengths.draw(random) for _ in range(20_000)])
        assert drawn.mean(axis=0) == pytest.approx([500, 200], rel=0.02)
        assert drawn.std(axis=0) == pytest.approx([250, 100], rel=0.05)
