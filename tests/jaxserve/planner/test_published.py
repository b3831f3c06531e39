"""Step-3's tables to the printed digits (`golden/planner/tables.txt`; the paper's number stands
under one that differs), and published measurements (`golden/planner/world.txt`, and README.md).
"""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.plan import main
from jaxserve.planner.published import (
    LARGE,
    agreement,
    compare,
    read_measurements,
    report,
    speed_range,
    summary,
    tables,
)
from tests import golden


def test_all_printed_numbers_but_three_agree():
    """2 / 3600 / 1.98e15 = 2.806e-19: that one does not follow from the paper's own numbers."""
    found = tables()
    golden.check("planner/tables.txt", report(found).text + "\n")
    assert agreement(found) == (
        "225 of 228 printed numbers agree to the printed digits\n"
        "  Table 5, H800, a FLOP: 2.81e-19, the paper prints 2.80e-19\n"
        "  Text, MM M1, activated B: 47, the paper prints 46\n"
        "  Text, Pangu Pro MoE, activated B: 15.7, the paper prints 16.5"
    )


def test_a_tree_for_programs():
    tree = {table["name"]: table["rows"] for table in report(tables()).tree}
    assert tree["Table 4"]["A800"]["FP8 FLOP/s"] == {"value": None, "printed": "N/A"}
    assert tree["Table 4"]["H800"]["USD/hour"] == {"value": 2.0, "printed": "2"}
    assert tree["Text"]["Qwen3 32B"].keys() == {"activated B"}


def test_errors_and_their_reasons():
    """`golden/planner/world.txt` has them all; most were fitted to nothing."""
    found = {one.measurement.name: one for one in compare()}
    layers = [one for name, one in found.items() if name.startswith("attention layer")]
    assert len(layers) == 16
    assert max(abs(one.error) for one in layers) <= 0.26
    far = [one for one in found.values() if abs(one.error) > LARGE]
    assert len(far) == 4
    assert not any(one.unexplained for one in found.values())
    free = [abs(one.error) for one in found.values() if not one.measurement.fitted]
    assert sum(free) / len(free) <= 0.201
    assert summary(list(found.values())).startswith("mean |error| 20% of 27 numbers")


def test_the_range_of_whole_systems():
    """Slower than predicted on the mean; vLLM and v7x are the slowest."""
    found = speed_range()
    assert found[:1] == (17,)
    assert found[1:] == pytest.approx((0.624, 0.863, 1.064), abs=1e-3)


def test_every_number_has_a_source_and_says_what_was_taken():
    for one in read_measurements():
        assert one.source.startswith("https://")
        assert one.given
        assert one.taken


def test_the_table(capsys, tmp_path):
    page = tmp_path / "world.html"
    assert main(["tables", "--world", "--html", str(page)]) == 0
    golden.check("planner/world.txt", capsys.readouterr().out)
    assert "https://github.com/deepseek-ai/profile-data" in page.read_text()


def test_a_wrong_file_is_named(tmp_path):
    folder = tmp_path / "world"
    folder.mkdir()
    (folder / "measurements.yaml").write_text("- {name: x, speed: 3}")
    with pytest.raises(ConfigError, match=r"measurements\.yaml: Object contains unknown field"):
        read_measurements(tmp_path)
