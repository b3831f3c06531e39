from jaxserve.planner.checks import checks
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.models import load_model


def by_name(model: str, attention: str, ffn: str, tpot: float = 0.05):
    found = checks(load_model(model), 8192, tpot, load_hardware(attention), load_hardware(ffn))
    return {check.name.split(" (")[0]: check for check in found}


def test_step_3_is_dense_enough_for_h800_and_deepseek_is_not():
    assert by_name("step3", "h800", "h800")["sparsity"].holds
    sparse = by_name("deepseek-v3", "h800", "h800")["sparsity"]
    assert not sparse.holds
    assert sparse.numbers.startswith(
        "experts' sparsity 0.035, least 0.058 for NVIDIA H800 at 50 ms"
    )


def test_deepseek_is_dense_enough_for_h20():
    assert by_name("deepseek-v3", "h20", "h20")["sparsity"].holds


def test_step_3_on_l20():
    found = by_name("step3", "l20", "l20")
    assert found["attention in time"].holds
    assert "40 sequences of 8,192" in found["attention in time"].numbers
    assert found["FFN in time"].holds
    assert "6 hosts, 48 NVIDIA L20" in found["FFN in time"].numbers


def test_step_3_on_l4():
    found = by_name("step3", "l4", "l4")
    assert "3 sequences of 8,192" in found["attention in time"].numbers
    assert not found["FFN in time"].holds


def test_a_dense_model_has_no_sparsity():
    assert "sparsity" not in by_name("qwen3-32b", "h800", "h800")
