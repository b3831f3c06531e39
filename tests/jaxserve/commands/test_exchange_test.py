import logging

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.commands import exchange_test
from jaxserve.config.load import load_deployment
from jaxserve.model.ffn import exchange

SIZES = {"ffn.ep": 2, "ffn.exchange": "alltoall"}
POISON = """
import jax.numpy as jnp
from jaxserve.model.ffn import exchange
real = exchange.exchanged_rows
exchange.exchanged_rows = lambda *rows, **how: jnp.roll(real(*rows, **how), 1, axis=0)
"""


@pytest.fixture
def on_cpus(monkeypatch):
    monkeypatch.setattr(exchange_test, "PLATFORMS", ("cpu",))
    return monkeypatch


@pytest.mark.parametrize(
    ("work", "chosen", "said"),
    [
        ("", "alltoall", None),
        ("raise SystemExit(1)", "gather", "exit status 1."),
        ("import os; os.abort()", "gather", "SIGABRT"),
        ("import time; time.sleep(99)", "gather", "timed out after"),
    ],
)
def test_a_failure_a_crash_and_a_hang_fall_back_with_one_warning(
    on_cpus, caplog, work, chosen, said
):
    on_cpus.setattr(exchange_test, "WORKER", ("-Sc", work))
    on_cpus.setattr(exchange_test, "SECONDS", 0.5 if "sleep" in work else 30.0)
    with caplog.at_level(logging.WARNING):
        found = exchange_test.with_tested_exchange(load_deployment("demo", SIZES), [])
    assert found.ffn.exchange == chosen
    assert [said in one.message for one in caplog.records] == [True] * (said is not None)


def test_other_exchanges_and_platforms_are_not_tested(monkeypatch):
    monkeypatch.setattr(exchange_test, "WORKER", None)  # would fail
    deployment = load_deployment("demo", SIZES)
    assert exchange_test.with_tested_exchange(deployment, []) is deployment
    monkeypatch.setattr(exchange_test, "PLATFORMS", ("cpu",))
    gather = load_deployment("demo", SIZES | {"ffn.exchange": "gather"})
    assert exchange_test.with_tested_exchange(gather, []) is gather


@pytest.mark.nightly
def test_wrong_rows_fall_back_and_tokens_stay_right(on_cpus, tmp_path):
    """The real test in its own process, where the all-to-all is as wrong as in this one."""
    words = ["--config", "demo", *(f"--set={key}={value}" for key, value in SIZES.items())]
    deployment = load_deployment("demo", SIZES)
    assert exchange_test.with_tested_exchange(deployment, words) is deployment
    (tmp_path / "sitecustomize.py").write_text(POISON)
    on_cpus.setenv("PYTHONPATH", f"{tmp_path}:.")
    on_cpus.setattr(exchange, "exchanged_rows", lambda *rows, **how: 0 / 0)
    found = exchange_test.with_tested_exchange(deployment, words)
    assert found.ffn.exchange == "gather"

    def tokens(sizes):
        sizes |= {"lanes": 1, "scheduler.token_buckets": [64], "scheduler.page_buckets": [64]}
        with LLM("configs/demo.yaml", overrides=sizes) as llm:
            (output,) = llm.generate(["def f("], SamplingParams(max_tokens=8, temperature=0))
            return output.token_ids

    assert tokens(SIZES | {"ffn.exchange": found.ffn.exchange}) == tokens({"mode": "colocated"})
