import msgspec
import pytest

from jaxserve.config.deployment import Deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.model.ffn.traffic import ExchangeMesh
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.models import cost_model, load_model, model_config
from jaxserve.planner.stages import Calculator
from jaxserve.roles.role_bytes import role_bytes
from tests import golden


@golden.table("planner/parameters.yaml")
def test_parameters(name, parameters, activated):
    model = load_model(name)
    assert model.parameters / 1e9 == pytest.approx(parameters, rel=0.002)
    assert model.activated / 1e9 == pytest.approx(activated, rel=0.025)


def test_sparsity():
    moe = load_model("step3").moe
    assert round(moe.sparsity, 3) == 0.082  # 4 of 49, the shared expert included
    assert load_model("qwen3-32b").moe is None


def test_parameters_by_tensor_parallelism():
    group = load_model("step3").attention[0]
    split, whole = group.split_parameters(7168)
    assert split == 2048 * 16384 + 16384 * 7168
    assert whole == 7168 * (2048 + 512)
    group = load_model("deepseek-v3").attention[0]
    split, whole = group.split_parameters(7168)
    assert split == 1536 * 24576 + 512 * 128 * 256 + 16384 * 7168
    assert whole == 7168 * (1536 + 576)


@golden.table("planner/device_bytes.yaml")
def test_bytes_of_a_device_are_those_of_the_engines_templates(
    name, number_format, dp, tp, ep, ffn_tp, whole
):
    """Norms and scales, which the sums leave out, are less than 0.5 %."""
    config = model_config(CONFIGS / "models" / name)
    tree = {
        "model": "",
        "attention": {"dp": dp, "tp": tp, "weights": number_format},
        "ffn": {"ep": ep, "tp": ffn_tp, "weights": number_format, "whole_shared": whole},
        "cache": {"format": number_format, "pages": 512, "page_size": 16},
    }
    attention, ffn = role_bytes(config, msgspec.convert(tree, Deployment))
    formats = Formats(weights=number_format, cache=number_format, dispatch="bfloat16")
    calculator = Calculator(cost_model(config), 512 * 16, formats, Assumptions())
    assert calculator.attention_weights(tp) == pytest.approx(attention.weights, rel=0.005)
    mesh = ExchangeMesh(ep, ffn_tp, attention=dp * tp, whole=whole)
    assert calculator.ffn_weights(mesh, load_hardware("v6e")) == pytest.approx(
        ffn.weights, rel=0.005
    )
    assert calculator.sequence_bytes(tp) == attention.cache


COST = """d_model: 8
vocab: 16
attention: [{layers: 2, kind: gqa, q_heads: 2, kv_heads: 1, head_dim: 4}]
ffn: [{layers: FFN, shared_d_ff: 32}]
"""


def test_a_path_is_a_model_too(tmp_path):
    (tmp_path / "cost.yaml").write_text(COST.replace("FFN", "2"), encoding="utf-8")
    model = load_model(str(tmp_path))
    assert model.linear_parameters == 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8)
    assert model.ffn_parameters == 2 * 3 * 8 * 32
    (tmp_path / "cost.yaml").write_text(COST.replace("FFN", "3"), encoding="utf-8")
    with pytest.raises(ConfigError, match="2 attention layers and 3 FFN layers"):
        load_model(str(tmp_path))


def test_unknown_models_list_the_known():
    with pytest.raises(ConfigError, match=r"'step-3' is not known; did you mean 'step3'\? Known: "):
        load_model("step-3")
    with pytest.raises(ConfigError, match=r"Known: deepseek-v3, ernie-4.5, glm-4.5-air"):
        load_model("abacus")


def test_a_wrong_config_json_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "step3_text"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: .*hidden_size"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="'abacus' is not one of step3_vl"):
        load_model(str(tmp_path))
