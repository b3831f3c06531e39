import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.planner.assumptions import Assumptions
from jaxserve.planner.noise import Jitter
from jaxserve.planner.quantities import PAPER, assumptions, jitter, prices, seconds, tokens


@pytest.mark.parametrize(
    ("text", "value"), [("50ms", 0.05), ("50", 0.05), ("0.05s", 0.05), (" 16.6 ms ", 0.0166)]
)
def test_times(text, value):
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("8192", 8192), ("8K", 8192), ("32k", 32768)])
def test_tokens(text, value):
    assert tokens(text) == value


@pytest.mark.parametrize(
    ("read", "texts", "option"),
    [
        (seconds, ["", "0", "-1", "5 minutes", "1.2.3", "ms", "nan", "inf"], "--tpot"),
        (tokens, ["", "0", "-1", "8M", "1e4", "99999999"], "--context"),
    ],
)
def test_times_and_contexts_that_are_none(read, texts, option):
    for text in texts:
        with pytest.raises(ConfigError, match=option):
            read(text)


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_an_error(text):
    for read in (seconds, tokens, lambda item: prices([item]), lambda item: assumptions([item])):
        with contextlib.suppress(ConfigError):
            assert read(text)


def test_prices():
    assert prices(["H100=1.9", "h20=1"]) == {"h100": 1.9, "h20": 1.0}
    for wrong in ("h100", "h100=free", "=2", "h100=0", "h100=nan"):
        with pytest.raises(ConfigError, match="--price"):
            prices([wrong])


def test_assumptions():
    assert assumptions([]) == Assumptions()
    assert assumptions(["paper"]) == PAPER
    given = assumptions(["compute=0.5", "broadcast=true"])
    assert given == Assumptions(compute=0.5, broadcast=True)
    with pytest.raises(ConfigError, match="expected one of compute, memory, network"):
        assumptions(["speed=1"])
    with pytest.raises(ConfigError, match=r"compute = 2.0 \(from 0.01 to 1.0\); overlap = -1.0"):
        assumptions(["compute=2", "overlap=-1"])
    with pytest.raises(ConfigError, match="--assume: "):
        assumptions(["compute=fast"])


def test_microseconds_and_the_option_that_is_wrong():
    assert seconds("200us") == pytest.approx(2e-4)
    with pytest.raises(ConfigError, match="--host 'soon'"):
        seconds("soon", "--host")
    with pytest.raises(ConfigError, match="--prompt 'many'"):
        tokens("many", "--prompt")


class TestJitter:
    def test_of_all_stages_and_of_one(self):
        found = jitter(["0.05", "combine=0.3"], "0.001:1ms")
        assert found.spread == {"attend": 0.05, "dispatch": 0.05, "ffn": 0.05, "combine": 0.3}
        assert (found.stall_probability, found.stall_seconds) == (0.001, 1e-3)
        assert found.stall_exponent == 0.0
        assert jitter([], "0.001:1ms:1.5").stall_exponent == 1.5

    def test_none(self):
        assert jitter([], "") == Jitter()

    @pytest.mark.parametrize("item", ["11", "-1", "head=0.1", "ffn=x", "nan"])
    def test_what_is_wrong_is_named(self, item):
        with pytest.raises(ConfigError, match="--jitter"):
            jitter([item], "")

    @pytest.mark.parametrize("stall", ["0.1", "2:1ms", "0.1:never", "0.1:1ms:0", "0.1:1ms:x"])
    def test_a_wrong_stall(self, stall):
        with pytest.raises(ConfigError, match="--stall"):
            jitter([], stall)
