import numpy as np
import pytest

from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.models import load_model, model_config
from jaxserve.roles.sizing import attention_cost, count_parameters
from tests import golden


@golden.table("planner/parameters.yaml")
def test_parameters(name, activated, as_long, expanded):
    config = model_config(CONFIGS / "models" / name)
    assert count_parameters(config).activated / 1e9 == pytest.approx(activated, rel=0.025)
    lengths = [1 / attention_cost(config, platform, 8192) for platform in ("tpu", "gpu")]
    assert lengths == pytest.approx([as_long, expanded], rel=0.01)


def test_parameters_by_tensor_parallelism():
    """On a device: query heads are divided, low-rank queries and latents are not; nor are keys and
    values of two heads over four devices."""
    for name, split, whole in (
        ("step3", 2048 * 16384 + 16384 * 7168, 7168 * (2048 + 512)),
        ("deepseek-v3", 1536 * 24576 + 512 * 128 * 256 + 16384 * 7168, 7168 * (1536 + 576)),
        ("qwen3.5-35b-a3b", 2048 * 3 * 16 * 256, 2048 * 2 * 2 * 256),
    ):
        model = load_model(name)
        found = model.declared(model.attention[-1].spec, Formats(), 4, "gpu")
        assert found.parameters == split / 4 + whole


def test_the_order_of_layers():
    """Step-3 begins and ends with dense layers; of Llama 4, every fourth sees all tokens."""
    config, model = model_config(CONFIGS / "models/step3"), load_model("step3")
    dense = [layer for layer, (_, ffn) in enumerate(model.order) if ffn == 0]
    assert dense == [layer for layer in range(config.layers) if not config.layer(layer).ffn.router]
    llama = load_model("llama-4-maverick")
    full = [layer for layer, (attention, _) in enumerate(llama.order) if attention == 0]
    assert len(full) == llama.attention[0].layers
    assert set(np.diff(full)) == {4}


def test_modules_have_the_windows_of_their_declaration():
    """Step-3.5's three prediction modules: dense FFNs, and a window of 512 tokens."""
    modules = load_model("step-3.5-flash").modules
    assert [(a.spec.window, f.experts, f.shared_d_ff) for a, f in modules] == [(512, 0, 11264)] * 3


PLANNED = golden.text("planner/planned.yaml")


def test_a_path_is_a_model_too(tmp_path):
    (tmp_path / "model.yaml").write_text(PLANNED, encoding="utf-8")
    model = load_model(str(tmp_path))
    assert (model.layers, model.ffn[0].shared_d_ff) == (2, 32)
    with pytest.raises(ConfigError, match=r"the engine cannot run .*, only plan it"):
        model_config(tmp_path, served=True)
    wrong = PLANNED.replace("rope", "windw: 4, rope")
    (tmp_path / "model.yaml").write_text(wrong, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown field `windw` - at `\$\.decoder\[0\]\[0\]"):
        load_model(str(tmp_path))


@golden.table("planner/no_models.yaml")
def test_what_is_no_model(tmp_path, name, kind, said):
    """Unknown names list the known ones; a wrong config.json names the file."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}', encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        load_model(name or str(tmp_path))
