import logging
from types import SimpleNamespace

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.commands import self_tests
from jaxserve.config.load import load_deployment
from jaxserve.link import runtime_link
from jaxserve.model.ffn import collectives
from jaxserve.preflight import parts
from jaxserve.preflight.outcomes import Failed
from tests import golden

SIZES = {"ffn.ep": 2, "ffn.exchange": "alltoall"}
POISON = golden.text("commands/poison.txt")


@pytest.fixture
def on_gpus(monkeypatch):
    """GPUs, as far as the decision what to test goes."""
    monkeypatch.setattr(self_tests, "choose_platform", lambda: "cuda")
    return monkeypatch


@golden.table("commands/fallbacks.yaml")
def test_a_failure_a_crash_and_a_hang_fall_back_with_one_warning(
    on_gpus, caplog, work, chosen, said
):
    on_gpus.setattr(self_tests, "WORKER", ("-Sc", work))
    on_gpus.setattr(self_tests, "SECONDS", 0.5 if "sleep" in work else 30.0)
    with caplog.at_level(logging.WARNING):
        found = self_tests.with_tested_links(load_deployment("demo", SIZES), [])
    assert found.ffn.exchange == chosen
    assert [said in one.message for one in caplog.records] == [True] * (said is not None)


@golden.table("commands/tested_links.yaml")
def test_what_is_tested_where(monkeypatch, platform, overrides, tested):
    monkeypatch.setattr(self_tests, "choose_platform", lambda: platform)
    found = self_tests._doubtful(load_deployment("demo", overrides))
    assert [name for _, name, _ in found] == tested


@pytest.mark.parametrize(
    ("platform", "processes", "chosen"),
    [("tpu", [0, 1], "ppermute"), ("tpu", [0, 0], "device_put"), ("cuda", [0, 1], "device_put")],
)
def test_between_hosts_of_tpus_messages_are_permuted(platform, processes, chosen):
    both = [SimpleNamespace(platform=platform, process_index=number) for number in processes]
    meshes = [SimpleNamespace(devices=np.asarray([device], object)) for device in both]
    assert runtime_link._default(*meshes) == chosen


def test_a_slow_device_put_fails(monkeypatch):
    times = {"device_put": [{"round_trip": 3e-3}], "ppermute": [{"round_trip": 1e-3}]}
    monkeypatch.setattr(parts.jax, "process_count", lambda: 2)
    monkeypatch.setattr(parts, "links", lambda *given: ("", times))
    with pytest.raises(Failed, match="more than 2 times as long as ppermute"):
        parts.transport(None, None)


@pytest.mark.nightly
def test_wrong_rows_fall_back_and_tokens_stay_right(on_gpus, tmp_path):
    """The real test in its own process, where the all-to-all is as wrong as in this one."""
    words = ["--config", "demo", *(f"--set={key}={value}" for key, value in SIZES.items())]
    deployment = load_deployment("demo", SIZES)
    assert self_tests.with_tested_links(deployment, words) is deployment
    (tmp_path / "sitecustomize.py").write_text(POISON)
    on_gpus.setenv("PYTHONPATH", f"{tmp_path}:.")
    on_gpus.setattr(collectives, "exchanged_rows", lambda *rows, **how: 0 / 0)
    found = self_tests.with_tested_links(deployment, words)
    assert found.ffn.exchange == "gather"

    def tokens(sizes):
        sizes |= {"lanes": 1, "scheduler.token_buckets": [64], "scheduler.page_buckets": [64]}
        with LLM("configs/demo.yaml", overrides=sizes) as llm:
            (output,) = llm.generate(["def f("], SamplingParams(max_tokens=8, temperature=0))
            return output.token_ids

    assert tokens(SIZES | {"ffn.exchange": found.ffn.exchange}) == tokens({"mode": "colocated"})
