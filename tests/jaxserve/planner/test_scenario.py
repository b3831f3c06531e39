"""What a deployment's keys are in the planner's words."""

import json
import shutil

import pytest

from jaxserve.config.deployment import Deployment, load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.planner.scenario import model_of


def deployment(folder, products) -> Deployment:
    changes = {"model": str(folder), "attention.int8_products": products}
    return load_deployment(CONFIGS / "demo.yaml", changes | {"cache.format": "int8"})


@pytest.fixture
def folder(tmp_path):
    source = CONFIGS / "models" / "qwen3-32b" / "config.json"
    shutil.copy(source, tmp_path)
    return tmp_path


def layers(folder, products) -> list[tuple[int, bool]]:
    model, _ = model_of(deployment(folder, products), CONFIGS)
    return [(group.layers, group.int8_products) for group in model.attention]


def test_layers_that_multiply_in_int8(folder):
    assert layers(folder, "none") == [(64, False)]
    assert layers(folder, [0, 5, 6]) == [(61, False), (3, True)]
    assert layers(folder, list(range(64))) == [(64, True)]


def test_those_that_were_measured(folder):
    with pytest.raises(ConfigError, match=r"attention.int8_products = auto: .*int8_products.json"):
        layers(folder, "auto")
    found = {"weights": "a digest", "layers": [1, 2], "measured": {}}
    (folder / "int8_products.json").write_text(json.dumps(found))
    assert layers(folder, "auto") == [(62, False), (2, True)]
