from jaxserve.planner.checks import checks
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.models import load_model


def by_name(model: str, attention: str, ffn: str, tpot: float = 0.05):
    found = checks(load_model(model), 8192, tpot, load_hardware(attention), load_hardware(ffn))
    return {check.name.split(" (")[0]: check for check in found}


def test_experts_are_dense_enough_for_some_hardware():
    assert by_name("step3", "h800", "h800")["sparsity"].holds
    assert by_name("deepseek-v3", "h20", "h20")["sparsity"].holds
    sparse = by_name("deepseek-v3", "h800", "h800")["sparsity"]
    assert not sparse.holds
    assert sparse.numbers.startswith("experts' sparsity 0.035, least 0.058 for NVIDIA H800")


def test_step_3_on_small_gpus():
    l20, l4 = by_name("step3", "l20", "l20"), by_name("step3", "l4", "l4")
    assert "40 sequences of 8,192" in l20["attention in time"].numbers
    assert "6 hosts, 48 NVIDIA L20" in l20["FFN in time"].numbers
    assert (l20["attention in time"].holds, l20["FFN in time"].holds) == (True, True)
    assert "3 sequences of 8,192" in l4["attention in time"].numbers
    assert not l4["FFN in time"].holds


def test_a_dense_model_has_no_sparsity():
    assert "sparsity" not in by_name("qwen3-32b", "h800", "h800")
