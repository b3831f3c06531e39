"""Step-3's tables 2 to 7, and statements of its text about its figures, to the printed digits.

`golden/planner/tables.txt` has every cell beside the printed one.
"""

import pytest

from jaxserve.planner.tables import Table, agreement, figures, load_sources, tables
from jaxserve.planner.view import Part
from tests import golden


@pytest.fixture(scope="module")
def printed() -> dict[str, Table]:
    return {table.name: table for table in tables(load_sources())}


@pytest.fixture(scope="module")
def drawn() -> dict[str, Table]:
    return {table.name: table for table in figures(load_sources())}


def test_every_cell(printed: dict[str, Table], drawn: dict[str, Table]):
    """The figures are 1, 2, 3a, 3b, 4 and 5."""
    assert (len(printed), len(drawn)) == (6, 6)
    everything = [*printed.values(), *drawn.values()]
    texts = [Part(f"{one.name}: {one.title}", one.text_rows).text for one in everything]
    golden.check("planner/tables.txt", "\n\n".join(texts) + "\n")


def test_all_printed_cells_but_one_agree(printed: dict[str, Table]):
    """2 / 3600 / 1.98e15 = 2.806e-19: the cell does not follow from the paper's own numbers."""
    assert agreement(list(printed.values())) == (
        "211 of 212 printed cells agree to the printed digits\n"
        "  Table 5, H800, a FLOP: 2.81e-19, the paper prints 2.80e-19"
    )
    cell = printed["Table 5"].rows["H800"][0]
    assert cell.difference == pytest.approx(0.0021, abs=1e-4)
    assert not cell.agrees


class TestFigures:
    def test_step_3_is_on_the_front_and_no_gqa_model_below_it(self, drawn):
        front = [label for label, row in drawn["Figure 1"].rows.items() if row[2].value]
        assert front == ["MM M1", "ERNIE 4.5", "Step-3"]

    def test_hybrids_read_and_cost_more_than_step_3_at_every_context(self, drawn):
        for name in ("Figure 3a", "Figure 3b"):
            rows = drawn[name].rows
            for hybrid in ("MM M1", "Llama 4 M"):
                pairs = zip(rows[hybrid], rows["Step-3"], strict=True)
                assert all(theirs.value > ours.value for theirs, ours in pairs)

    def test_pangu_is_less_than_half_as_dear_to_train_and_dearer_to_run(self, drawn):
        rows = drawn["Figure 4"].rows
        pangu, step3 = ([cell.value for cell in rows[name]] for name in ("Pangu Pro MoE", "Step-3"))
        assert pangu[0] > step3[0]
        assert pangu[1] > step3[1]
        assert pangu[2] < 0.5 * step3[2]


def test_a_tree_for_programs(printed: dict[str, Table]):
    tree = printed["Table 4"].tree
    none = {"value": 0.0, "printed": "N/A", "difference": None, "agrees": True}
    assert tree["rows"]["A800"]["FP8 FLOP/s"] == none
    assert tree["rows"]["H800"]["USD/hour"]["difference"] == 0.0
