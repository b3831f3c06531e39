"""The analytic number of attention devices: by hand, and beside simulated pipelines."""

from jaxserve.planner.balance import Balance
from jaxserve.planner.lanes import step_seconds
from jaxserve.planner.stage_times import Rooflines, even_rows
from tests.jaxserve.planner.making import H800, layout, searcher


def test_by_hand():
    """Until the FFN's 4 + 1 a group are attention's 10; where it has 4, (4 + n) (n + 1) / n is
    least at the root of 4, or of 16 where an ffn device costs as much as four."""
    made, wide = layout("afd", dp=2), layout("afd", dp=2, tp=2)
    assert Balance(10.0, 6.0, 8.0).attention_devices(made, (1.0, 1.0)) == 6
    assert Balance(4.0, 6.0, 8.0).attention_devices(made, (1.0, 1.0)) == 2
    assert Balance(4.0, 6.0, 8.0).attention_devices(made, (1.0, 4.0)) == 4
    assert Balance(1e3, 6.0, 8.0).attention_devices(wide, (1.0, 1.0)) == 2 * 996


def test_the_rule_finds_what_simulations_find():
    """Step-3 with 32 sequences of 8,000 tokens a group, beside 8 ffn devices."""
    search, costs = searcher("step3", context=8000), {}
    for dp in (8, 16, 24, 32, 48):
        planned, own = layout("afd", dp=dp, ffn_tp=8, lanes=3), search.calculator
        rows = even_rows(dp, 32 * dp, 32 * dp, 32 * dp * 8000, padded=32)
        times = Rooflines(planned, own, own, (H800, H800)).step(rows)
        costs[dp] = step_seconds(times, 3, dp) * planned.devices / dp
    found = search.balance(planned, 32).attention_devices(planned, (1.0, 1.0))
    assert costs[min(costs, key=lambda dp: abs(dp - found))] <= 1.05 * min(costs.values())
