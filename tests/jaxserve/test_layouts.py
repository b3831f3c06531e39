"""Same tokens: every layout, number of lanes, exchange and transport against the colocated run.

`make test` runs a subset that has every value of every factor; the whole product is behind the
marker `matrix`. A difference that `layouts.TIE` allows is reported as a property of the test.
"""

import pytest

from jaxserve.engine.make_engine import make_engine
from jaxserve.engine.request import SamplingParams
from tests.jaxserve import layouts
from tests.jaxserve.layouts import Difference, Reference

pytestmark = pytest.mark.unoptimised


ELSEWHERE = ("3A2F", "2A1F", "1A2F tp")


def tokens_of(model, overrides):
    with layouts.running(model, overrides) as engine:
        tokens = layouts.generate(engine)
        layouts.idle(engine)
    return tokens


@pytest.fixture(scope="module")
def reference(tiny_model, colocated_runtime):
    engine = make_engine(colocated_runtime, eos_token_ids=frozenset())
    engine.start()
    tokens = layouts.generate(engine)
    engine.close()
    return Reference.of(tiny_model, tokens)


def check(tokens, reference, case, record_property):
    found = layouts.differences(reference, tokens)
    for difference in found:
        record_property("difference", f"{case}: {difference}")
        print(f"{case}: {difference}")
    assert all(difference.allowed for difference in found), found


def test_the_reference_decides(reference):
    """16 prompts and more, each with all its tokens, none of which hangs on the last digits
    of a logit."""
    assert [len(tokens) for tokens in reference.tokens] == [layouts.OUTPUT_TOKENS] * 18
    assert len(set(map(tuple, reference.tokens))) == 18
    assert reference.smallest_margin > 1e-3


@pytest.mark.parametrize(
    "case",
    # Three devices that meet two: `test_families_layouts.py` and `test_layouts_processes.py`. Two
    # that meet one: `test_drafts.py`. `ffn.tp` alone: `test_families_layouts.py`.
    [
        pytest.param(case, marks=[pytest.mark.matrix] * (case.layout in ELSEWHERE))
        for case in layouts.SPANNING
    ],
    ids=str,
)
def test_layout_gives_the_colocated_tokens(case, tiny_model, reference, record_property):
    check(tokens_of(tiny_model, case.overrides), reference, case, record_property)


@pytest.mark.matrix
@pytest.mark.parametrize("case", layouts.matrix(), ids=str)
def test_every_layout_gives_the_colocated_tokens(case, tiny_model, reference, record_property):
    check(tokens_of(tiny_model, case.overrides), reference, case, record_property)


def test_the_subset_spans_the_product():
    product = layouts.matrix()
    assert len(product) == len(set(product)) == 72
    assert set(layouts.SPANNING) <= set(product)
    assert len(layouts.SPANNING) == len(layouts.LAYOUTS)
    for factor in range(4):
        assert {case[factor] for case in layouts.SPANNING} == {case[factor] for case in product}


@pytest.mark.parametrize("overrides", [{"attention.dp": 2, "attention.tp": 2}], ids=["2 x 2"])
def test_colocated_on_several_devices(overrides, tiny_model, reference, record_property):
    tokens = tokens_of(tiny_model, {**layouts.COLOCATED, **overrides})
    check(tokens, reference, overrides, record_property)


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


def test_preempted_requests_give_the_same_tokens(
    tiny_model, reference, record_property, afd_runtime
):
    """Of 18 prompts only a few fit 22 pages at a time, so the youngest is sent back again and
    again, and recomputes what it had."""
    small_pool = layouts.deployment(tiny_model, {"lanes": 2, "cache.pages": 22})
    runtime = afd_runtime._replace(deployment=small_pool)
    engine = make_engine(runtime, eos_token_ids=frozenset())
    engine.start()
    tokens = layouts.generate(engine)
    layouts.idle(engine)
    engine.close()
    assert engine.schedulers[0].num_preemptions > 2
    check(tokens, reference, "preemption", record_property)


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

    def test_equal(self):
        assert layouts.differences(self.REFERENCE, [[5, 6, 7], [1, 2, 3]]) == []

    def test_a_tie_may_go_the_other_way_and_what_follows_is_another_text(self):
        found = layouts.differences(self.REFERENCE, [[5, 9, 9], [1, 2, 3]])
        assert found == [Difference(prompt=0, place=1, token=9, expected=6, margin=5e-5)]
        assert found[0].allowed

    def test_anything_else_is_wrong(self):
        found = layouts.differences(self.REFERENCE, [[5, 6, 8], [1, 9, 3]])
        assert found == [Difference(0, 2, 8, 7, 1.0), Difference(1, 1, 9, 2, 2e-4)]
        assert not any(difference.allowed for difference in found)

    def test_a_missing_or_further_token_is_wrong(self):
        found = layouts.differences(self.REFERENCE, [[5, 6], [1, 2, 3, 4]])
        assert [(d.token, d.expected, d.allowed) for d in found] == [
            (None, 7, False),
            (4, None, False),
        ]

    def test_json(self):
        assert Reference.load(self.REFERENCE.dump()) == self.REFERENCE
