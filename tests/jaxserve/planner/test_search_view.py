import json

import msgspec
import pytest

from jaxserve.plan import main, parser
from jaxserve.planner.layouts import Target
from jaxserve.planner.options import assumptions
from jaxserve.planner.search_view import Case, map_cases, map_values
from jaxserve.planner.view import PagePart, declared
from tests import golden
from tests.jaxserve.planner.making import H800, searcher


def cases(*tpots: str) -> list[Case]:
    asked = ["map", "--contexts", "4K", "--max-devices", "2", "--tpots", *tpots]
    return map_cases(parser().parse_args(asked), "qwen3-30b-a3b", "h800")


def parts(found: list[Case]) -> list[PagePart]:
    return declared("map", **map_values(found))


@pytest.fixture(scope="module")
def found() -> list[Case]:
    return cases("20ms", "50ms")


def test_costs_are_those_of_a_search(found):
    search = searcher("qwen3-30b-a3b")
    for case in found:
        plans = search.search(Target(tpot=case.tpot, max_devices=2)).plans
        for mode, plan in case.best.items():
            assert plan.tpot <= case.tpot
            assert plan.dollars == min(each.dollars for each in plans if each.layout.mode == mode)


def test_rows_and_summary(found):
    golden.check("planner/map.txt", "\n".join(part.text for part in parts(found)) + "\n")
    assert all(case.winner in ("ep", "tp") for case in found)


def priced(mix: str, **dollars: float) -> Case:
    search = searcher("qwen3-30b-a3b")
    best = {}
    for mode, cost in dollars.items():
        layouts = search.layouts(Target(tpot=1.0, max_devices=2, modes=(mode,)))
        plan = search.evaluate(next(iter(layouts)), 1)
        best[mode] = msgspec.structs.replace(plan, dollars=cost)
    return Case("qwen", mix, 4096, 0.05, best)


def test_advice_names_where_afd_costs_least():
    """Published systems: EP reached 0.64 to 0.92 of its predicted speed, AFD 1.04 to 1.08."""
    won, lost = priced("h20", ep=0.5, afd=0.4, tp=0.6), priced("h800", tp=0.4, afd=0.5)
    assert won.likely == pytest.approx((0.8 * 0.6391 / 1.0764, 0.8 * 0.9218 / 1.036))
    assert priced("h20", afd=0.4).likely is None
    (_, row) = parts([won, lost, priced("l20", afd=0.3)])[0].rows
    pace = ": ".join(won.best["afd"].slowest)
    assert row == ["qwen", "50", "1 of 2", "0.80", "0.47 to 0.71", "h20", "4096", pace]
    assert parts([priced("l20", afd=0.3)])[0].rows[1][2:4] == ["0 of 0", ""]


def test_nothing_meets_an_absurd_target():
    (case,) = cases("1us")
    assert (case.winner, case.ratio) == (None, None)
    assert parts([case])[1].rows[1][4:] == ["-", "", "", ""]


def test_published_systems_overlap_and_colocation_is_not_broadcast_to():
    """A broadcast is of AFD's link: EP exchanges as before."""
    search = searcher("deepseek-v3", assumed=assumptions(["published"]))
    deepseek = search.calculator
    layouts = list(search.layouts(Target(tpot=0.05, max_devices=32)))
    wide = next(each for each in layouts if each.mode == "ep" and each.dp == 32)
    group = deepseek.model.ffn[1]
    assert deepseek.exchange_kind(group, wide.ffn_mesh, H800) == "alltoall"
    afd = next(each for each in layouts if each.mode == "afd" and each.ep > 1)
    assert deepseek.exchange_kind(group, afd.ffn_mesh, H800) == "gather"


def test_the_command(capsys):
    command = "map --models qwen3-30b-a3b --hardware h20+h800 --contexts 4K --tpots 50ms"
    assert main([*command.split(), "--max-devices", "2", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["scope"].startswith("decode only")
    (case,) = tree["cases"]
    assert case["hardware"] == "h20+h800"
    assert case["best"]["afd"]["attention"] == "h20"
    assert case["best"]["tp"]["attention"] in ("h20", "h800")
    command += " --tpots 100ms --max-devices 1 --jobs 2 --models qwen3-30b-a3b qwen3-32b"
    assert main(command.split()) == 0
    shown = capsys.readouterr().out
    assert shown.index("qwen3-30b-a3b") < shown.index("qwen3-32b")
    assert "decode only" in shown
