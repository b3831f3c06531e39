"""Written plans are deployments."""

import re
from typing import Any

import msgspec
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.planner.deployment_file import PlanFile, deployment_text
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import model_config, model_folder
from tests import golden
from tests.jaxserve.planner.making import layout, searcher


def written(tmp_path, name: str, planned: Layout, batch: int = 32, **formats: str):
    folder = model_folder(name)
    config = model_config(folder)
    search = searcher(name, "h800 h20", context=8192, **formats)
    made, hardware = search.calculator, {each: load_hardware(each) for each in ("h800", "h20")}
    file = PlanFile(tmp_path / "plan.yaml", folder, config, hardware)
    text = deployment_text(file, search.evaluate(planned, batch), made)
    (tmp_path / "plan.yaml").write_text(text, encoding="utf-8")
    return load_deployment(tmp_path / "plan.yaml"), text


AFD = layout("afd", dp=8, ep=16, lanes=3)
INT8 = {"weights": "int8", "cache": "bfloat16", "dispatch": "int8"}


def other(**changes: Any) -> Layout:
    return msgspec.structs.replace(AFD, **changes)


TWO_KINDS = other(attention="h20", dp=16, ep=8, transport="pull")


@pytest.mark.parametrize(
    ("name", "model", "planned", "batch", "formats"),
    [
        ("afd", "step3", AFD, 32, {}),
        ("shared-ranks", "deepseek-v3", other(ep=288, shared_ranks=32), 32, {}),
        ("fp8-blocks", "deepseek-v3", AFD, 32, {}),  # stay as the files have them
        ("int8", "deepseek-v3", AFD, 32, INT8),
        ("drafts", "deepseek-v3", other(drafts=2), 32, {}),
        ("replicas", "deepseek-v3", other(redundant_slots=1), 32, {}),  # rebalanced at times
        ("colocated", "step3", layout("ep", dp=8), 7, {}),
        ("two-kinds", "step3", TWO_KINDS, 32, {}),  # runtimes of a host
        ("context", "qwen3-32b", AFD, 1, {}),  # as long as the model allows
    ],
)
def test_written(name, model, planned, batch, formats, tmp_path):
    deployment, text = written(tmp_path, model, planned, batch, **formats)
    golden.check(f"planner/plans/{name}.yaml", re.sub(r"(?m)^model: .*$", "model: FOLDER", text))
    assert deployment.domains * deployment.attention.dp == planned.dp
    assert deployment.lanes == planned.lanes


@pytest.mark.parametrize("batch", [1, 500])
def test_buckets_of_colocated_sequences(tmp_path, batch):
    deployment, _ = written(tmp_path, "step3", layout("ep", dp=8), batch)
    assert deployment.scheduler.token_buckets == [batch, batch + max(batch, 128)]
