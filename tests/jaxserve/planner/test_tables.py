"""Step-3's tables 2 to 7 and the numbers beside its figures, to the printed digits.

`golden/planner/tables.txt` has every number; the paper's stands under one that differs.
"""

from jaxserve.planner.tables import agreement, report, tables
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
