"""A deployment's keys in the planner's words."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.fingerprint import revision
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.planner.assumptions import Assumptions
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.scenario import Roles, Scenario, model_of, scenario
from jaxserve.planner.stage_times import attend
from tests import golden


def deployment(folder, products) -> Deployment:
    changes = {"model": str(folder), "attention.int8_products": products}
    return load_deployment(CONFIGS / "demo.yaml", changes | {"cache.format": "int8"})


@pytest.fixture
def folder(tmp_path):
    source = CONFIGS / "models" / "qwen3-32b" / "config.json"
    shutil.copy(source, tmp_path)
    return tmp_path


def layers(folder, products) -> list[tuple[int, bool]]:
    model = model_of(deployment(folder, products), CONFIGS)
    return [(group.layers, group.int8_products) for group in model.attention]


def test_layers_that_multiply_in_int8(folder):
    assert layers(folder, "none") == [(64, False)]
    assert layers(folder, [0, 5, 6]) == [(61, False), (3, True)]
    assert layers(folder, list(range(64))) == [(64, True)]


def test_those_that_were_measured(folder):
    with pytest.raises(ConfigError, match=r"attention.int8_products = auto: .*int8_products.json"):
        layers(folder, "auto")
    found = {"weights": revision(folder).digest, "layers": [1, 2], "measured": {}}
    (folder / "int8_products.json").write_text(json.dumps(found))
    assert layers(folder, "auto") == [(62, False), (2, True)]


def on(hardware: str, folder: Path, stored: type, changes: dict[str, str]) -> Scenario:
    """A Qwen3-32B with FP32 activations, whose files have one matrix, of this dtype."""
    matrix = np.zeros((151936, 1), stored)
    save_file({"model.embed_tokens.weight": matrix}, folder / "model.safetensors")
    settings = {"model": str(folder), "dtype": "float32", "mode": "colocated"}
    made = load_deployment(CONFIGS / "demo.yaml", settings | changes)
    model, one = model_of(made, CONFIGS), load_hardware(hardware)
    return scenario(made, model, Roles(one, one, (hardware,) * 2), 2048, Assumptions())


@golden.table("planner/held_floats.yaml")
def test_float_matrices_are_counted_as_they_are_held(folder, hardware, stored, changes, size):
    """Worked out by hand: a layer of 5120 x (2 x 8192 + 2 x 1024), a head of 151936 x 5120. CPUs
    keep BF16 matrices beside FP32 activations."""
    made = on(hardware, folder, np.dtype(stored).type, changes)
    assert (made.attention.formats.linear, made.attention.combine_bytes()) == ("float32", 4 * 5120)
    if hardware == "cpu":  # 19.4 GB/s, of which 0.9, and 50 us
        head = size * 777_912_320 / (0.9 * 19.4e9) + 50e-6
        assert made.attention.head(made.roles.attention, 1, 1) == pytest.approx(head)
        linear = (size * 94_371_840 + 2 * 4 * 128) / (0.9 * 19.4e9) + 50e-6  # two norms, too
        group = made.attention.model.attention[0]
        pairs = 2048 * 4 * 64 * 128 / (0.7 * 0.096e12)  # the longer: its products
        took = attend(made.attention, group, made.roles.attention, 1, 1)
        assert took.seconds == pytest.approx(linear + pairs)


def test_bfloat16_beside_float32_is_refused_where_nothing_converts(folder):
    with pytest.raises(ConfigError, match=r"ffn.weights = bfloat16 beside dtype = float32"):
        on("v6e", folder, np.float32, {"ffn.weights": "bfloat16"})


def test_a_converted_folder_is_counted_as_its_manifest_says(folder):
    config = json.loads((folder / "config.json").read_text())
    done = {"format": 2, "source": "", "weights": "int8", "dtype": "bfloat16"}
    (folder / "blocks").mkdir()
    manifest = {"conversion": done, "config": config, "files": {}, "blocks": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    made, one = deployment(folder, "none"), load_hardware("v6e")
    found = scenario(made, model_of(made, CONFIGS), Roles(one, one, ("v6e",) * 2), 1, Assumptions())
    assert [role.formats.weights for role in (found.attention, found.ffn)] == ["int8", "int8"]
