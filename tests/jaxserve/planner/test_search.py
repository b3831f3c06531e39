import msgspec
import pytest

from jaxserve.planner.assumptions import Assumptions
from jaxserve.planner.balance import Balance
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.lanes import step_seconds
from jaxserve.planner.layouts import Layout, Target
from jaxserve.planner.noise import Skew
from jaxserve.planner.search import Searcher, front, layer_seconds, overlapped_seconds, why_not
from jaxserve.planner.stage_times import Rooflines, even_rows
from tests import golden
from tests.jaxserve.planner.making import H800, calculator, layout, searcher


def afd(dp: int, lanes: int = 3, **sizes: int) -> Layout:
    return layout("afd", dp=dp, lanes=lanes, **{"ep": 2, "ffn_tp": 8} | sizes)


def test_seconds_of_a_layer():
    """One lane takes the sum, three balanced ones cycles of max(t_a, t_f, t_a2f + t_f2a)."""
    assert layer_seconds([5, 1, 4, 2], 1) == 12
    assert layer_seconds([4, 1, 4, 2], 3) == 3 * 4
    assert layer_seconds([4, 3, 4, 2], 3) == 3 * 5
    assert layer_seconds([4, 4, 4, 4], 2) == 16
    assert layer_seconds([9, 1, 1, 1], 2) == 18
    # Two colocated batches hide what moves, but not the FFN.
    assert overlapped_seconds([5, 1, 4, 2]) == 2 * (4 + 5)
    assert overlapped_seconds([5, 3, 4, 6]) == 2 * (4 + 9)
    assert overlapped_seconds([9, 1, 0, 0]) == 18


def test_two_batches_are_tried_where_they_are_assumed():
    target = Target(tpot=0.05, max_devices=16, modes=("ep",))
    lanes = {each.lanes for each in searcher("deepseek-v3").layouts(target)}
    assert lanes == {1}  # the engine's step is one program
    both = searcher("deepseek-v3", assumed=Assumptions(overlapped=True)).layouts(target)
    assert {each.lanes for each in both} == {1, 2}


class TestHost:
    def test_lanes_are_as_slow_as_their_host(self):
        """A process a GPU: 3 µs of the driver, and 125 of launches, calls and messages. The process
        that leads sends a step's plan to its 7 neighbours and 3 other hosts."""
        parts = ("host", "host_device", "host_gpu", "plan", "stage")
        free = Assumptions(**{f"{part}_seconds": 0.0 for part in parts})
        busy = msgspec.structs.replace(free, host_device_seconds=800e-6)
        layout = afd(16, lanes=4)
        plans = [searcher(assumed=each).evaluate(layout, 1) for each in (free, busy)]
        assert plans[0].tpot < 61 * 4 * 800e-6 < plans[1].tpot
        leads = (140 + 10 * 14) / 61 * 1e-6
        assert searcher().host_seconds(layout) == pytest.approx(128e-6 + leads)
        whole = msgspec.structs.replace(layout, whole_steps=True)
        assert searcher().host_seconds(whole) == 0.0
        colocated = msgspec.structs.replace(layout, mode="ep", lanes=1)
        assert searcher().host_seconds(colocated) == 0.0

    def test_a_process_of_several_devices(self):
        """TPUs: a process a host, of eight chips."""
        on_tpus = searcher("qwen3-30b-a3b", "v6e")
        layout = msgspec.structs.replace(afd(8, ep=1), attention="v6e", ffn="v6e")
        assert on_tpus.host_seconds(layout) == pytest.approx(83e-6 + (140 + 14) / 48 * 1e-6)
        alone = msgspec.structs.replace(layout, dp=4, ffn_tp=4)
        assert on_tpus.host_seconds(alone) == pytest.approx(43e-6)


class TestSearch:
    @pytest.fixture(scope="class")
    @staticmethod
    def found():
        return searcher("qwen3-30b-a3b", "v6e").search(Target(tpot=0.05, max_devices=16))

    def test_plans_of_all_modes_meet_the_target_cheapest_first(self, found):
        assert len(found.plans) > 20
        memory = searcher("qwen3-30b-a3b", "v6e").memory
        for plan in found.plans:
            assert plan.tpot <= 0.05
            assert plan.layout.devices <= 16
            assert max(memory.kept(plan.layout, plan.batch)) <= 0.9 * 34.3e9
            rate = plan.sequences / plan.tpot
            assert plan.tokens_per_second == pytest.approx(rate)
            dollars = 2.7 * plan.layout.devices / 3600 / rate * 1e6
            assert plan.dollars == pytest.approx(dollars)
        costs = [plan.dollars for plan in found.plans]
        assert costs == sorted(costs)
        assert {plan.layout.mode for plan in found.plans} == {"afd", "ep", "tp"}

    def test_one_sequence_more_breaks_the_target_or_the_memory(self, found):
        search = searcher("qwen3-30b-a3b", "v6e")
        for plan in found.plans[:10]:
            more = search.evaluate(plan.layout, plan.batch + 1)
            assert more.tpot > 0.05 or not search.memory.fits(plan.layout, plan.batch + 1)

    def test_the_front_rises_in_time_and_falls_in_cost(self, found):
        plans = front(found.points)
        assert [p.tpot for p in plans] == sorted(p.tpot for p in plans)
        assert [p.dollars for p in plans] == sorted((p.dollars for p in plans), reverse=True)
        cheapest = min(found.points, key=lambda plan: plan.dollars)
        assert plans[-1].dollars == cheapest.dollars

    def test_roles_may_have_hardware_of_their_own(self):
        h20, h800 = ({name: load_hardware(name)} for name in ("h20", "h800"))
        both = Searcher(calculator("qwen3-30b-a3b"), h20, h800)
        found = both.search(Target(tpot=0.05, max_devices=8))
        assert {(p.layout.attention, p.layout.ffn) for p in found.plans} == {("h20", "h800")}
        assert {plan.layout.mode for plan in found.plans} == {"afd"}
        assert all(plan.layout.topology.crosses_runtimes for plan in found.plans)


def test_roles_of_unequal_numbers_have_a_tpu_slice_each():
    """One slice has equal halves, since libtpu compiles collectives over no other part."""
    found = searcher("qwen3-30b-a3b", "v6e").layouts(Target(tpot=0.05, max_devices=24))
    roles = {(a.attention_devices, a.ffn_devices, a.transport) for a in found if a.mode == "afd"}
    assert {(8, 8, "auto"), (16, 8, "pull"), (8, 4, "pull"), (4, 1, "pull")} <= roles
    assert not [each for each in roles if {2, "pull"} <= {*each}]  # no slice has two chips
    assert {a == f for a, f, transport in roles if transport == "auto"} == {True}
    assert {devices.bit_count() for *both, _ in roles for devices in both} == {1}


def test_ranks_divide_the_experts_or_leave_few_slots_empty():
    """EP 288 of xDeepServe: 256 experts, and slots to spare. 192 would leave half of them empty."""

    def ranks(model: str, devices: int) -> set[int]:
        target = Target(tpot=0.05, max_devices=devices, modes=("afd",))
        found = searcher(model, "h800").layouts(target)
        return {each.ep for each in found if each.ffn_tp == 1}

    assert ranks("step3", 64) == {1, 2, 4, 8, 16, 24, 48}
    assert {64, 72, 144, 256, 288} <= ranks("deepseek-v3", 304) - {192}
    assert 192 not in ranks("deepseek-v3", 304)


def test_the_shared_expert_may_have_ranks_of_its_own():
    """xDeepServe: EP 288 = 256 + 32, either of which gets 1/32 of the rows."""
    search = searcher("deepseek-v3", "h800", assumed=Assumptions(alltoall=True))
    target = Target(tpot=0.05, max_devices=304, modes=("afd",), shared_ranks=True)
    found = {(each.ep, each.shared_ranks) for each in search.layouts(target)}
    assert {(288, 0), (288, 32), (144, 16), (72, 8), (256, 0), (16, 2)} <= found
    assert (1, 0) in found
    assert {shared for ep, shared in found if ep == 288} == {0, 32}
    wide = layout("afd", dp=16, ep=288, lanes=2)
    apart = msgspec.structs.replace(wide, shared_ranks=32)
    without = search.evaluate(apart, 64)
    expert = 58 * 3 * 7168 * 2048  # in every layer, FP8
    held = [search.memory.kept(one, 64)[1] for one in (wide, apart)]
    assert held[0] - held[1] == pytest.approx(expert, rel=1e-3)
    assert "288 h800 (ep 288 = 256 + 32 shared tp 1)" in without.layout.text
    none = Target(tpot=0.05, max_devices=304, modes=("afd",))
    assert not any(each.shared_ranks for each in search.layouts(none))
    step3 = searcher("step3", "h800").layouts(msgspec.structs.replace(target, max_devices=65))
    assert (64, 16) in {(each.ep, each.shared_ranks) for each in step3}  # 48 experts


def test_replicas_where_experts_are_unevenly_popular():
    slow = Assumptions(compute=0.05, alltoall=True)
    h800 = {"h800": H800}
    made = calculator("deepseek-v3", assumed=slow)
    search = Searcher(made, h800, h800, skew=Skew("zipf", 1.0))
    target = Target(tpot=0.05, max_devices=72, modes=("afd",))
    wide = [each for each in search.layouts(target) if each.ep == 64]
    assert {each.redundant_slots for each in wide} == {0, 1, 2}
    one = next(each for each in wide if each.redundant_slots == 1)
    none = msgspec.structs.replace(one, redundant_slots=0)
    with_replicas, without = search.evaluate(one, 512), search.evaluate(none, 512)
    assert with_replicas.stages["ffn"].seconds < 0.8 * without.stages["ffn"].seconds
    slot = 58 * 3 * 7168 * 2048  # of one expert in every layer, FP8
    held = [search.memory.kept(each, 512)[1] for each in (one, none)]
    assert held[0] - held[1] == pytest.approx(slot, rel=1e-3)
    assert "1 redundant slot" in with_replicas.layout.text
    assert all(not each.redundant_slots for each in searcher("step3").layouts(target))


def drafting(*shares: float) -> Searcher:
    return searcher("deepseek-v3", context=8192, acceptance=shares)


def with_drafts(drafts: int) -> Layout:
    return layout("afd", dp=16, ep=16, lanes=2, drafts=drafts)


def test_a_module_takes_the_memory_of_a_layer():
    """DeepSeek-V3 §2.2 and §4.1; maps in FP8, those per head and [7168, 14336] in BF16."""
    memory = drafting(0.9).memory
    plain, drafted = (memory.kept(with_drafts(drafts), 32) for drafts in (0, 1))
    cached = 2 * 32 * 8192 * (576 + 4)
    per_head = 512 * 128 * (128 + 128)
    maps = 7168 * (1536 + 576) + 1536 * 128 * 192 + per_head + 128 * 128 * 7168
    router, entrance = 2 * 256 * 7168, 2 * 7168 * 14336
    expected = cached + maps + per_head + router + entrance
    assert drafted[0] - plain[0] == pytest.approx(expected, rel=1e-3)
    experts = 16 * 3 * 7168 * 2048
    assert 0 < drafted[1] - plain[1] - experts <= 1.001 * 3 * 7168 * 2048


def test_time_between_tokens():
    """Drafts never accepted cost passes and wider batches: less than steps of their own."""
    plain = drafting().evaluate(with_drafts(0), 1)
    never = drafting(0.0, 0.0).evaluate(with_drafts(2), 1)
    always = drafting(1.0, 1.0).evaluate(with_drafts(2), 1)
    assert 1 < never.tpot / plain.tpot < 3
    # The second pass takes as long as a layer, the map and the head of a step without drafts.
    once = drafting(0.0).evaluate(with_drafts(1), 1)
    assert 0 < never.tpot - once.tpot < 2 * (once.tpot - plain.tpot)
    assert always.tpot == pytest.approx(never.tpot / 3)
    assert always.tokens_a_step == 3
    assert always.tokens_per_second == pytest.approx(16 * 2 / always.tpot)


@pytest.mark.parametrize(("share", "drafts"), [(0.0, {0}), (0.95, {1, 2, 3})])
def test_the_search_takes_as_many_as_pay(share: float, drafts: set[int]):
    target = Target(tpot=0.05, max_devices=32, modes=("afd",), most_drafts=3)
    found = drafting(share, share, share).search(target)
    assert found.plans[0].layout.drafts in drafts
    assert {plan.layout.drafts for plan in found.points} == {0, 1, 2, 3}


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


def advice(model: str, hardware: str, context: int, tpot: float, devices: int, **formats) -> str:
    search = searcher(model, hardware, context=context, **formats)
    found = search.search(target := Target(tpot=tpot, max_devices=devices))
    assert found.plans == []
    return why_not(search, target, found)


def test_what_would_meet_a_target():
    """More devices, a smaller format, more time or a shorter context."""
    texts = [
        advice("kimi-k2", "h800", 8192, 0.05, 8),
        advice("qwen3-30b-a3b", "l20", 4096, 0.05, 1, weights="bfloat16"),
        advice("step3", "h800", 4096, 0.002, 32),
        advice("qwen3-32b", "l4", 524288, 0.05, 4),
    ]
    golden.check("planner/advice.txt", "\n\n".join(texts) + "\n")


def test_the_tpot_that_it_names_can_be_met():
    text = advice("qwen3-30b-a3b", "h100", 4096, 0.003, 8)
    named = float(text.rpartition("a TPOT of ")[2].partition(" ms")[0]) * 1e-3
    target = Target(tpot=named + 1e-4, max_devices=8)
    assert searcher("qwen3-30b-a3b", "h100").search(target).plans
