"""Step-3's tables 2 to 7, and what its text says of its figures, to the printed digits."""

import pytest

from jaxserve.planner.tables import Table, figures, load_sources, tables
from jaxserve.planner.text import agreement, as_tree, compared_text

PRINTED = {
    "Table 2": """
        DSv3          2.88e+08 1.47e+11 2.28e+10 4.84e+10
        Kimi_K2       2.88e+08 7.37e+10 1.23e+10 4.84e+10
        Qwen3_MoE     7.89e+08 2.52e+10 1.34e+10 2.84e+10
        Qwen3_32B     1.07e+09 1.72e+10 1.21e+10 5.03e+10
        Llama_4_M     1.01e+09 8.05e+09 6.04e+09 2.42e+10
        MM_M1         9.23e+08 3.42e+09 3.75e+10 5.44e+10
        ERNIE_4.5     9.06e+08 1.45e+10 1.63e+10 7.61e+10
        Pangu_Pro_MoE 8.05e+08 8.05e+09 6.04e+09 2.38e+10
        Step-3        2.56e+08 3.27e+10 2.07e+10 5.33e+10
        """,
    "Table 3": """
        DSv3          1.15e+09 5.89e+11 2.28e+10 4.84e+10
        Kimi_K2       1.15e+09 2.95e+11 1.23e+10 4.84e+10
        Qwen3_MoE     3.15e+09 1.01e+11 1.34e+10 2.84e+10
        Qwen3_32B     4.29e+09 6.87e+10 1.21e+10 5.03e+10
        Llama_4_M     2.21e+09 1.41e+10 6.04e+09 2.42e+10
        MM_M1         1.93e+09 1.15e+10 3.75e+10 5.44e+10
        ERNIE_4.5     3.62e+09 5.80e+10 1.63e+10 7.61e+10
        Pangu_Pro_MoE 3.22e+09 3.22e+10 6.04e+09 2.38e+10
        Step-3        1.02e+09 1.31e+11 2.07e+10 5.33e+10
        """,
    "Table 4": """
        H800 2    9.89e+14 1.98e+15 3.35e+12 591
        H20  0.8  1.48e+14 2.96e+14 4.00e+12 74
        A800 0.75 3.12e+14 N/A      2.00e+12 156
        910B 0.67 2.80e+14 N/A      1.60e+12 175
        """,
    "Table 5": """
        H800 2.80e-19 1.66e-16
        H20  7.51e-19 5.56e-17
        A800 6.68e-19 1.04e-16
        910B 6.65e-19 1.16e-16
        """,
    "Table 6": """
        DSv3          0.054 0.128 0.114 0.113 0.197 0.460 0.409 0.407 0.014 0.036 0.032 0.032
        Kimi_K2       0.051 0.065 0.057 0.057 0.194 0.231 0.205 0.204 0.014 0.036 0.032 0.032
        Qwen3_MoE     0.135 0.054 0.091 0.101 0.527 0.185 0.338 0.376 0.008 0.021 0.019 0.019
        Qwen3_32B     0.181 0.069 0.120 0.133 0.716 0.248 0.455 0.508 0.014 0.038 0.034 0.033
        Llama_4_M     0.169 0.060 0.109 0.121 0.369 0.128 0.235 0.262 0.007 0.018 0.016 0.016
        MM_M1         0.164 0.079 0.121 0.132 0.330 0.135 0.226 0.249 0.015 0.041 0.036 0.036
        ERNIE_4.5     0.155 0.063 0.105 0.116 0.606 0.214 0.388 0.432 0.021 0.057 0.051 0.051
        Pangu_Pro_MoE 0.135 0.049 0.088 0.098 0.536 0.183 0.340 0.379 0.007 0.018 0.016 0.016
        Step-3        0.048 0.040 0.040 0.043 0.176 0.114 0.120 0.133 0.015 0.040 0.036 0.035
        """,
    "Table 7": """
        H800 0.058
        H20  0.007
        A800 0.031
        910B 0.034
        """,
}
"""The tables as the paper prints them (arXiv 2507.19427)."""

MISPRINTED = {("Table 5", "H800", 0): "2.81e-19"}
"""Cells that do not follow from the paper's own numbers: 2 / 3600 / 1.98e15 = 2.806e-19."""


@pytest.fixture(scope="module")
def printed() -> dict[str, Table]:
    return {table.name: table for table in tables(load_sources())}


@pytest.fixture(scope="module")
def drawn() -> dict[str, Table]:
    return {table.name: table for table in figures(load_sources())}


@pytest.mark.parametrize("name", PRINTED)
def test_every_cell_comes_out_to_the_printed_digits(printed: dict[str, Table], name: str):
    expected = {}
    for line in PRINTED[name].strip().splitlines():
        label, *cells = line.split()
        expected[label.replace("_", " ")] = cells
    table = printed[name]
    assert {row: [cell.printed for cell in cells] for row, cells in table.rows.items()} == expected
    for (wrong, row, column), ours in MISPRINTED.items():
        if wrong == name:
            expected[row][column] = ours
    assert {row: [cell.text for cell in cells] for row, cells in table.rows.items()} == expected


def test_every_table_is_there(printed: dict[str, Table]):
    assert list(printed) == list(PRINTED)


def test_a_misprint_is_off_by_a_fifth_of_a_percent(printed: dict[str, Table]):
    cell = printed["Table 5"].rows["H800"][0]
    assert cell.difference == pytest.approx(0.0021, abs=1e-4)
    assert not cell.agrees


class TestFigures:
    def test_all_five(self, drawn):
        assert list(drawn) == [f"Figure {n}" for n in ("1", "2", "3a", "3b", "4", "5")]

    def test_activated_parameters_in_billions(self, drawn):
        found = {label: row[0].text for label, row in drawn["Figure 1"].rows.items()}
        # The paper: 37, 32, 22, 32, 17 (Meta), 46, 47, 16.5, 38, from the models' own reports,
        # which count the head or not.
        assert found == {
            "DSv3": "37",
            "Kimi K2": "32",
            "Qwen3 MoE": "22",
            "Qwen3 32B": "32",
            "Llama 4 M": "16",
            "MM M1": "47",
            "ERNIE 4.5": "47",
            "Pangu Pro MoE": "15.7",
            "Step-3": "38",
        }

    def test_step_3_is_on_the_front_and_no_gqa_model_below_it(self, drawn):
        rows = drawn["Figure 1"].rows
        front = [label for label, row in rows.items() if row[2].value]
        assert front == ["MM M1", "ERNIE 4.5", "Step-3"]

    @pytest.mark.parametrize(
        ("label", "short", "long"),
        [
            ("Step-3", "0.055", "0.129"),
            ("DSv3", "0.068", "0.211"),
            ("Qwen3 MoE", "0.062", "0.193"),
        ],
    )
    def test_the_cheapest_deployments_of_section_4_2(self, drawn, label, short, long):
        table = drawn["Figure 2"]
        row = dict(zip(table.columns, table.rows[label], strict=True))
        assert (row["8K AFD"].text, row["32K AFD"].text) == (short, long)

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

    def test_arithmetic_intensities(self, drawn):
        found = {label: row[-1].text for label, row in drawn["Figure 5"].rows.items()}
        assert found == {
            "DSv3": "512",
            "Qwen3 MoE": "32",
            "Step-3": "128",
            "H800": "591",
            "H20": "74",
            "A800": "156",
            "910B": "175",
        }


class TestText:
    def test_ours_the_papers_and_the_difference_stand_below_each_other(self, printed):
        lines = compared_text(printed["Table 7"]).splitlines()
        assert lines[0] == "Table 7: minimum sparsity of experts, width 7168, 61 layers"
        assert [line.split() for line in lines[2:6]] == [
            ["minimum", "S"],
            ["H800", "0.058"],
            ["paper", "0.058"],
            ["difference", "+0.35%"],
        ]

    def test_agreement_names_what_does_not_agree(self, printed):
        assert agreement(list(printed.values())) == (
            "211 of 212 printed cells agree to the printed digits\n"
            "  Table 5, H800, a FLOP: 2.81e-19, the paper prints 2.80e-19"
        )

    def test_a_tree_for_programs(self, printed):
        tree = as_tree(printed["Table 4"])
        assert tree["rows"]["A800"]["FP8 FLOP/s"] == {
            "value": 0.0,
            "printed": "N/A",
            "difference": None,
            "agrees": True,
        }
        assert tree["rows"]["H800"]["USD/hour"]["difference"] == 0.0
