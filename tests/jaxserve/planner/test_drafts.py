import pytest

from jaxserve.errors import ConfigError
from jaxserve.planner.drafts import Acceptance, acceptance, passes
from jaxserve.planner.layouts import Layout, Target
from jaxserve.planner.search import Searcher
from tests.jaxserve.planner import making
from tests.jaxserve.planner.making import searcher


def drafting(*shares: float) -> Searcher:
    return searcher("deepseek-v3", context=8192, acceptance=Acceptance(shares))


def layout(drafts: int) -> Layout:
    return making.layout("afd", dp=16, ep=16, lanes=2, drafts=drafts)


def test_a_draft_counts_only_where_those_before_it_were_accepted():
    shares = Acceptance((0.9, 0.5, 0.5))
    assert [shares.tokens(drafts) for drafts in range(4)] == pytest.approx([1, 1.9, 2.35, 2.575])


def test_the_first_pass_takes_all_tokens_of_a_step():
    assert list(passes(8, 3)) == [(8, 4), (8, 1), (8, 1)]
    assert not list(passes(8, 0))


@pytest.mark.parametrize(
    ("text", "most", "shares"),
    [("0.9", 3, (0.9, 0.9, 0.9)), ("0.9,0.5", 2, (0.9, 0.5)), ("1, 0", 1, (1.0, 0.0))],
)
def test_acceptance(text: str, most: int, shares: tuple[float, ...]):
    assert acceptance(text, most) == Acceptance(shares)


@pytest.mark.parametrize("text", ["", "often", "1.1", "0.9,-0.1", "nan", "0.9,0.8"])
def test_wrong_acceptance(text: str):
    with pytest.raises(ConfigError, match="--acceptance"):
        acceptance(text, 3)


def test_a_module_takes_the_memory_of_a_layer():
    """DeepSeek-V3 §2.2 and §4.1; maps in FP8, those per head and [7168, 14336] in BF16."""
    plain, drafted = (drafting(0.9).evaluate(layout(drafts), 32) for drafts in (0, 1))
    cached = 2 * 32 * 8192 * (576 + 4)
    per_head = 512 * 128 * (128 + 128)
    maps = 7168 * (1536 + 576) + 1536 * 128 * 192 + per_head + 128 * 128 * 7168
    router, entrance = 2 * 256 * 7168, 2 * 7168 * 14336
    expected = cached + maps + per_head + router + entrance
    assert drafted.attention_bytes - plain.attention_bytes == pytest.approx(expected)
    experts = 16 * 3 * 7168 * 2048
    shared = drafted.ffn_bytes - plain.ffn_bytes - experts
    assert 0 < shared <= 3 * 7168 * 2048


def test_time_between_tokens():
    """Drafts that are never accepted cost their passes and wider batches, which take less than
    steps of their own."""
    plain = drafting().evaluate(layout(0), 1)
    never = drafting(0.0, 0.0).evaluate(layout(2), 1)
    always = drafting(1.0, 1.0).evaluate(layout(2), 1)
    assert 1 < never.tpot / plain.tpot < 3
    assert always.tpot == pytest.approx(never.tpot / 3)
    assert always.tokens_a_step == 3
    assert always.tokens_per_second == pytest.approx(16 * 2 / always.tpot)


def test_two_passes_of_a_module():
    """The second takes as long as a layer, the map and the head of a step without drafts."""
    one, two = (drafting(0.0, 0.0).evaluate(layout(drafts), 1).tpot for drafts in (1, 2))
    widened = drafting(0.0).evaluate(layout(1), 1).tpot - drafting().evaluate(layout(0), 1).tpot
    assert 0 < two - one < 2 * widened


@pytest.mark.parametrize(("share", "drafts"), [(0.0, {0}), (0.95, {1, 2, 3})])
def test_the_search_takes_as_many_as_pay(share: float, drafts: set[int]):
    target = Target(tpot=0.05, max_devices=32, modes=("afd",), most_drafts=3)
    found = drafting(share, share, share).search(target)
    assert found.plans[0].layout.drafts in drafts
    assert {plan.layout.drafts for plan in found.points} == {0, 1, 2, 3}
