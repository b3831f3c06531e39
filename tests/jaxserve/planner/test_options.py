import argparse
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.plan import main
from jaxserve.planner import options
from jaxserve.planner.assumptions import Assumptions
from tests import golden


def test_texts():
    """`golden/planner/options.txt` lists them."""
    golden.check_values("planner/options.txt", lambda value: value, globals() | vars(options))


WRONG = [
    (options.seconds, ["", "0", "-1", "5 minutes", "1.2.3", "ms", "nan", "inf", "soon"]),
    (options.tokens, ["", "0", "-1", "8M", "1e4", "99999999", "many"]),
    (options.price, ["h100", "h100=free", "=2", "h100=0", "h100=nan"]),
    (options.spread, ["11", "-1", "head=0.1", "ffn=x", "nan"]),
    (options.number(1, 8), ["0", "9", "1.5", "x"]),
    (options.READERS["level"], ["p5=2s", "p100=2s", "mean=2s", "p95", "p95=0s", "95=2s"]),
    (options.READERS["failures"], ["1000:10", "10h:1000h", "h:1h", "1000h", "1..0h:1h"]),
]


@pytest.mark.parametrize(("read", "texts"), WRONG)
def test_wrong_texts_are_refused(read, texts):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}': expected"):
            read(text)


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_an_error(text):
    quantities = (options.READERS[name] for name in ("seconds", "tokens", "price", "spread"))
    for read in (*quantities, lambda item: options.assumptions([item])):
        with contextlib.suppress(ConfigError, argparse.ArgumentTypeError):
            assert read(text)


@pytest.mark.parametrize("command", options.TABLE["commands"])
def test_each_command_prints_its_options(command):
    parser = argparse.ArgumentParser()
    options.add_command(parser, command)
    assert all(f"--{option}" in parser.format_help() for option in ("json", "html", "configs"))


def test_assumptions():
    assert options.assumptions([]) == Assumptions()
    assert options.assumptions(["published"]).overlap == 1.0
    given = options.assumptions(["compute=0.5", "broadcast=true"])
    assert given == Assumptions(compute=0.5, broadcast=True)


@pytest.mark.parametrize("text", ["", "often", "1.1", "0.9,-0.1", "nan", "0.9,0.8"])
def test_wrong_acceptance(text: str):
    with pytest.raises(ConfigError, match="--acceptance"):
        options.acceptance(text, 3)


def test_each_is_told_with_its_option(capsys: pytest.CaptureFixture[str]):
    def said(command: str) -> str:
        assert main(command.split()) == 2
        return capsys.readouterr().err.replace(str(CONFIGS), "CONFIGS")

    golden.check_each("planner/wrong.txt", said)
