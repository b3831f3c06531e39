"""What `plan tables` shows is what the planner says now: Step-3's tables to the printed digits
(`golden/planner/tables.txt`; the paper's number stands under one that differs), and published
measurements (`golden/planner/world.txt`).
"""

import json

import pytest

from jaxserve.plan import main
from jaxserve.planner.hardware import read_json
from jaxserve.planner.models import load_model
from jaxserve.planner.published import Predicted, Tables, speed_range
from tests import golden
from tests.jaxserve.planner import published
from tests.jaxserve.planner.published import LARGE, WORLD, token_cost

STALE = "python -m tests.jaxserve.planner.published writes it anew; review the difference"


def test_all_printed_numbers_but_three_agree(capsys):
    """2 / 3600 / 1.98e15 = 2.806e-19: that one does not follow from the paper's own numbers."""
    found = published.tables()
    assert found == read_json(WORLD / "tables.json", Tables), STALE
    assert found.agreement == [
        "225 of 228 printed numbers agree to the printed digits",
        "  Table 5, H800, a FLOP: 2.81e-19, the paper prints 2.80e-19",
        "  Text, MM M1, activated B: 47, the paper prints 46",
        "  Text, Pangu Pro MoE, activated B: 15.7, the paper prints 16.5",
    ]
    assert main(["tables"]) == 0
    golden.check("planner/tables.txt", capsys.readouterr().out)
    assert main(["tables", "--json"]) == 0
    tree = {table["name"]: table["rows"] for table in json.loads(capsys.readouterr().out)}
    assert tree["Table 4"]["A800"]["FP8 FLOP/s"] == {
        "value": None,
        "ours": "N/A",
        "printed": "N/A",
    }
    assert tree["Text"]["Qwen3 32B"].keys() == {"activated B"}


def test_what_others_measured(capsys, tmp_path):
    """Most were fitted to nothing; vLLM and v7x are the slowest of whole systems."""
    found, rows = published.predicted(), published.read_measurements()
    stored = read_json(WORLD / "predicted.json", Predicted)
    assert found.summary == stored.summary, STALE
    assert found.predicted == pytest.approx(stored.predicted, rel=1e-4), STALE
    assert found.speed == pytest.approx(speed_range(), abs=1e-3), STALE
    assert speed_range() == pytest.approx((17, 0.624, 0.863, 1.064), abs=1e-3)
    errors = {one.name: found.predicted[one.name] / one.measured - 1 for one in rows}
    layers = [error for name, error in errors.items() if name.startswith("attention layer")]
    assert len(layers) == 16
    assert max(map(abs, layers)) <= 0.26
    assert sum(abs(error) > LARGE for error in errors.values()) == 4
    assert found.summary.startswith("mean |error| 20% of 27 numbers")
    assert found.summary.endswith("4 above 35%, 0 of them without a reason")
    for one in rows:
        assert one.source.startswith("https://")
        assert one.given
        assert one.taken
    page = tmp_path / "world.html"
    assert main(["tables", "--world", "--html", str(page)]) == 0
    golden.check("planner/world.txt", capsys.readouterr().out)
    assert "https://github.com/deepseek-ai/profile-data" in page.read_text()


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
