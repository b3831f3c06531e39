"""What Step-3 (arXiv 2507.19427) says beside its tables."""

import pytest

from jaxserve.planner.cost import (
    attention_fit,
    cheapest,
    ffn_batch,
    ffn_fit,
    minimum_sparsity,
    network_batch,
    token_cost,
)
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.models import load_model

LAYER = 272e-6
"""16.6 ms over 61 layers (§6)."""


class TestNonFlagshipHardware:
    """§6."""

    def test_l20_attention(self):
        fit = attention_fit(load_model("step3"), load_hardware("l20"), LAYER)
        assert round(fit.readable_bytes / 1e6) == 235
        # 14.68 + 3.67 + 33.55 + 117.44 / 8 = 67 MB
        assert fit.linear_bytes == 7168 * 2048 + 7168 * 512 + 2048 * 16384 + 16384 * 7168 / 8
        assert round(fit.linear_bytes / 1e6) == 67
        assert round((fit.readable_bytes - fit.linear_bytes) / 1e6) == 168
        assert round(fit.cached_tokens / 1000) == 329  # the paper: 168 MB / 512 = 328K
        assert fit.cached_tokens // 8000 == 41

    def test_l20_ffn_takes_six_servers(self):
        fit = ffn_fit(load_model("step3"), load_hardware("l20"), LAYER)
        assert round(fit.layer_bytes / 1e6) == 118  # the paper cuts 117.5 to 117
        assert round(fit.host_bytes / 8 / 1e9, 1) == 7.2  # and 7.17 to 7.1
        assert round(fit.weight_bytes / 1e9) == 304  # "around 300 GB"
        assert (fit.hosts, fit.devices) == (6, 48)


class TestSparsity:
    """§5.3 and §5.4."""

    def test_deepseek_would_need_fourteen_experts(self):
        least = minimum_sparsity(load_hardware("h800"), 7168, 61)
        assert int((256 + 1) * round(least, 3) - 1 + 0.5) == 14
        longer = minimum_sparsity(load_hardware("h800"), 7168, 61, 0.025)
        assert longer == pytest.approx(0.0387, abs=1e-4)

    def test_batch_that_fills_an_ffn(self):
        h800 = load_hardware("h800")
        assert ffn_batch(h800, 1.0) == pytest.approx(295.5, abs=0.1)
        assert ffn_batch(h800, 4 / 49) == pytest.approx(3620, abs=1)

    def test_batch_that_the_network_carries(self):
        # §7.3 says 3,072 of 8 NICs of 400 Gbit/s, at less than the nominal rate.
        assert network_batch(load_hardware("h800"), 7168, 61, 0.0166) == pytest.approx(5062, abs=1)


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
