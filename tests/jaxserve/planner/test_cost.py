"""What Step-3 (arXiv 2507.19427) says beside its tables."""

import pytest

from jaxserve.planner.cost import (
    cheapest,
    minimum_sparsity,
    token_cost,
)
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.models import load_model


def test_deepseek_would_need_fourteen_experts():
    """§5.4."""
    least = minimum_sparsity(load_hardware("h800"), 7168, 61)
    assert int((256 + 1) * round(least, 3) - 1 + 0.5) == 14
    longer = minimum_sparsity(load_hardware("h800"), 7168, 61, 0.025)
    assert longer == pytest.approx(0.0387, abs=1e-4)


def test_step_3_at_16k():
    cost = token_cost(load_model("step3"), 16384)
    assert cost.cache_bytes == 61 * 512 * 16384
    assert cost.attention_flops == 4 * 61 * 64 * 256 * 16384


def test_cheapest_names_the_hardware():
    hardware = {name: load_hardware(name) for name in ("h800", "h20", "a800", "910b")}
    choice = cheapest(load_model("step3"), 8192, hardware)
    assert (choice.attention, choice.ffn) == ("h20", "h800")  # §4.2, observation 1


def test_an_indexer_reads_all_keys_and_attention_the_chosen_rows():
    cost = token_cost(load_model("deepseek-v3.2"), 131072)
    assert cost.cache_bytes == 61 * (2048 * 576 + 131072 * 128)
    assert cost.attention_flops == 61 * (4 * 128 * 576 * 2048 + 2 * 64 * 128 * 131072)


def test_compressed_attention_reads_its_window_and_rows_of_several_tokens():
    cost, context = token_cost(load_model("deepseek-v4-flash"), 131072), 131072
    rows = 43 * 128 + 21 * 512 + 20 * context // 128
    assert cost.cache_bytes == rows * 512 + 21 * context // 4 * 128
    assert cost.attention_flops == 4 * 64 * 512 * rows + 21 * 2 * 64 * 128 * context // 4
    assert cost.attention_flops == pytest.approx(16.1e9, rel=0.01)
