"""Written plans are deployments."""

import msgspec
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.planner.deployment_file import deployment_text
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import model_config, model_folder
from tests.jaxserve.planner.making import layout, searcher


def written(tmp_path, name: str, planned: Layout, batch: int = 32, **formats: str):
    folder = model_folder(name)
    config = model_config(folder)
    search = searcher(name, "h800 h20", context=8192, **formats)
    made, hardware = search.calculator, {each: load_hardware(each) for each in ("h800", "h20")}
    given = folder, config, 8192, made.formats, made.assumed, hardware, tmp_path
    text = deployment_text(search.evaluate(planned, batch), *given)
    (tmp_path / "plan.yaml").write_text(text, encoding="utf-8")
    return load_deployment(tmp_path / "plan.yaml"), text


AFD = msgspec.structs.replace(layout("afd", dp=8, ep=16, lanes=3), attention="h20")


def test_afd(tmp_path):
    deployment, text = written(tmp_path, "step3", AFD)
    assert deployment.mode == "afd"
    assert (deployment.attention.dp, deployment.ffn.ep, deployment.lanes) == (8, 16, 3)
    assert deployment.cache.pages == 3 * 32 * 128
    assert deployment.scheduler.slots == 32
    assert deployment.scheduler.max_length == 16384
    assert deployment.attention.weights == "fp8"
    assert deployment.attention.memory_gb == 97.5
    assert text.startswith(
        "# 8 NVIDIA H20 for attention, 16 NVIDIA H800 for the FFN: 768 sequences"
    )
    assert "# Predicted, not measured: " in text


def test_ranks_of_the_shared_expert(tmp_path):
    other = msgspec.structs.replace(AFD, ep=288, shared_ranks=32)
    deployment, _ = written(tmp_path, "deepseek-v3", other)
    assert (deployment.ffn.ep, deployment.ffn.shared_ranks) == (288, 32)


def test_files_of_fp8_blocks_stay_as_they_are(tmp_path):
    deployment, _ = written(tmp_path, "deepseek-v3", AFD)
    assert deployment.ffn.weights == "auto"


def test_other_formats(tmp_path):
    formats = {"weights": "int8", "cache": "bfloat16", "dispatch": "int8"}
    deployment, _ = written(tmp_path, "deepseek-v3", AFD, **formats)
    assert deployment.ffn.weights == "int8"
    assert deployment.cache.format == "bfloat16"
    assert deployment.link.dispatch == "int8"


def test_drafts(tmp_path):
    other = msgspec.structs.replace(AFD, drafts=2)
    deployment, _ = written(tmp_path, "deepseek-v3", other)
    assert (deployment.speculative.method, deployment.speculative.drafts) == ("mtp", 2)
    assert deployment.scheduler.token_buckets == [32, 96, 224]


def test_slots_for_replicas_are_filled(tmp_path):
    other = msgspec.structs.replace(AFD, redundant_slots=1)
    deployment, _ = written(tmp_path, "deepseek-v3", other)
    assert (deployment.ffn.redundant_slots, deployment.experts.rebalance_seconds) == (1, 600)
    deployment, _ = written(tmp_path, "deepseek-v3", AFD)
    assert deployment.experts.rebalance_seconds == 0


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_colocated(tmp_path, batch):
    deployment, text = written(tmp_path, "step3", layout("ep", dp=8), batch)
    assert deployment.mode == "colocated"
    assert deployment.devices == 8
    assert deployment.scheduler.token_buckets == [batch, batch + max(batch, 128)]
    assert "8 NVIDIA H800, colocated: " in text


def test_a_context_as_long_as_the_model_allows(tmp_path):
    deployment, _ = written(tmp_path, "qwen3-32b", AFD, 1)
    assert deployment.scheduler.max_length == 16384
    assert deployment.cache.pages >= 16384 / 64
