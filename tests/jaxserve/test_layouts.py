"""Same tokens: every layout, number of lanes, exchange and transport against the colocated run.

The whole product is behind the marker `matrix`; see `layouts.SHOWN`.
"""

import functools

import pytest

from jaxserve.engine.request import SamplingParams
from jaxserve.engine.spread import SpreadPrompt
from tests.jaxserve import layouts
from tests.jaxserve.layouts import Difference, Reference, check

pytestmark = pytest.mark.unoptimised


def tokens_of(model, overrides):
    with layouts.running(model, overrides) as engine:
        tokens = layouts.generate(engine)
        layouts.idle(engine)
    return tokens


def test_the_reference_decides(reference):
    """At least 16 whole prompts, none of which hangs on the last digits of a logit."""
    assert [len(tokens) for tokens in reference.tokens] == [layouts.OUTPUT_TOKENS] * 18
    assert len(set(map(tuple, reference.tokens))) == 18
    assert reference.smallest_margin > 1e-3


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.matrix] * (case != layouts.SHOWN))
        for case in layouts.matrix()
    ],
    ids=str,
)
def test_every_layout_gives_the_colocated_tokens(case, tiny_model, reference):
    check(reference, tokens_of(tiny_model, case.overrides), case)


@pytest.mark.parametrize("output", ["whole", "split"])
def test_colocated_on_several_devices(output, tiny_model, reference):
    sizes = {"attention.dp": 2, "attention.tp": 2, "attention.output": output, "lanes": 3}
    sizes |= {"pipeline": "step" if output == "split" else "layer"}
    check(reference, tokens_of(tiny_model, layouts.COLOCATED | sizes), "2 x 2")


@pytest.mark.parametrize("mode", ["colocated", "afd"])
def test_long_prompts_over_several_groups(mode, tiny_model, reference, monkeypatch):
    """Each alone, so that the other groups are idle; then beside all others."""
    spread, issued = [], SpreadPrompt.issued

    note = functools.partialmethod(lambda self: spread.append(len(self.parts)) or issued(self))
    monkeypatch.setattr(SpreadPrompt, "issued", note)
    sizes = {"mode": mode, "attention.dp": 3, "scheduler.spread": True, "lanes": 2}
    sizes["pipeline"] = "step" if mode == "colocated" else "layer"
    with layouts.running(tiny_model, sizes) as engine:
        alone = layouts.one_by_one(engine, layouts.PROMPTS, layouts.GREEDY)
        assert [spread.count(groups) for groups in (2, 3)] == [4, 4]
        check(reference, alone, "alone")
        check(reference, layouts.generate(engine), "together")


@pytest.mark.parametrize("dispatch", [pytest.param("fp8", marks=pytest.mark.matrix), "int8"])
def test_quantised_wire_is_the_colocated_run_that_quantises_at_the_same_place(
    dispatch, tiny_model, reference
):
    """Not within a tie, but token for token: both round the same values; in INT8 both ways."""
    wire = {"link.dispatch": dispatch}
    if dispatch == "int8":
        wire["link.combine"] = "int8"
    colocated = tokens_of(tiny_model, {**layouts.COLOCATED, **wire})
    assert tokens_of(tiny_model, {**wire, "lanes": 2}) == colocated
    assert colocated != reference.tokens, f"{dispatch} changes nothing"


# On two meshes every block runs that the colocated step has.
@pytest.mark.parametrize("mode", [pytest.param("colocated", marks=pytest.mark.nightly), "afd"])
def test_bfloat16_runs(mode, tiny_model, reference):
    """Other roundings, other tokens, but the texts begin alike."""
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    with layouts.running(tiny_model, {"mode": mode, "dtype": "bfloat16"}) as engine:
        tokens = layouts.generate(engine, params=params)
    assert [len(row) for row in tokens] == [9] * 18
    agree = sum(a[0] == b[0] for a, b in zip(tokens, reference.tokens, strict=True))
    assert agree >= 14, f"{agree} of 18 first tokens agree"


class TestVerdict:
    REFERENCE = Reference([[5, 6, 7], [1, 2, 3]], [[1.0, 5e-5, 1.0], [1.0, 2e-4, 1.0]])

    def test_a_tie_may_go_the_other_way_and_what_follows_is_another_text(self):
        assert layouts.differences(self.REFERENCE, [[5, 6, 7], [1, 2, 3]]) == []
        found = layouts.differences(self.REFERENCE, [[5, 9, 9], [1, 2, 3]])
        assert found == [Difference(prompt=0, place=1, token=9, expected=6, margin=5e-5)]
        assert found[0].allowed

    def test_anything_else_is_wrong(self):
        found = layouts.differences(self.REFERENCE, [[5, 6, 8], [1, 9, 3]])
        assert found == [Difference(0, 2, 8, 7, 1.0), Difference(1, 1, 9, 2, 2e-4)]
        found += layouts.differences(self.REFERENCE, [[5, 6], [1, 2, 3, 4]])
        assert [(one.token, one.expected) for one in found[2:]] == [(None, 7), (4, None)]
        assert not any(difference.allowed for difference in found)
