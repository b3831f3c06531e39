"""Written plans are deployments."""

import re

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
    file = PlanFile(tmp_path / "plan.yaml", folder, config, hardware, made)
    text = deployment_text(file, search.evaluate(planned, batch), 0.05)
    (tmp_path / "plan.yaml").write_text(text, encoding="utf-8")
    return load_deployment(tmp_path / "plan.yaml"), text


@golden.table("planner/written_plans.yaml")
def test_written(name, model, mode, changes, batch, formats, tmp_path):
    sizes = {"dp": 8, "ep": 16, "lanes": 3} if mode == "afd" else {"dp": 8}
    planned = msgspec.structs.replace(layout(mode, **sizes), **changes)
    deployment, text = written(tmp_path, model, planned, batch, **formats)
    golden.check(f"planner/plans/{name}.yaml", re.sub(r"(?m)^model: .*$", "model: FOLDER", text))
    assert deployment.domains * deployment.attention.dp == planned.dp
    assert deployment.lanes == planned.lanes


@pytest.mark.parametrize("batch", [1, 500])
def test_buckets_of_colocated_sequences(tmp_path, batch):
    deployment, _ = written(tmp_path, "step3", layout("ep", dp=8), batch)
    assert deployment.scheduler.token_buckets == [batch, batch + max(batch, 128)]
