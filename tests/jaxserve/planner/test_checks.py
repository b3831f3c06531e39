"""Checks of Step-3 and others on large and small GPUs (§5 and §6 of its paper)."""

from jaxserve.planner.checks import checks
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.models import load_model
from jaxserve.planner.search_view import check_lines
from tests import golden


def test_models_on_hardware():
    """DeepSeek-V3 is not dense enough for H800, an L4 too small; dense models have no sparsity."""
    lines = []
    for model, name in (
        *(("step3", "h800"), ("step3", "l20"), ("step3", "l4")),
        *(("deepseek-v3", "h800"), ("deepseek-v3", "h20"), ("qwen3-32b", "h800")),
    ):
        hardware = load_hardware(name)
        found = checks(load_model(model), 8192, 0.05, hardware, hardware)
        lines += [f"{model} on {name}", *check_lines(found)]
    golden.check("planner/checks.txt", "\n".join(lines) + "\n")
