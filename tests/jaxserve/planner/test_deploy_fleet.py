"""Predictions of fleets, queues and prefill workers, beside formulas worked out by hand."""

import math

import numpy as np
import pytest

from jaxserve.planner.deploy_demand import Demand, Level
from jaxserve.planner.deploy_fleet import (
    Chunk,
    DecodeUnit,
    Fleet,
    Handoff,
    Overloaded,
    PrefillWorker,
    Steps,
    Waiting,
    capacity,
    decoding,
    erlang_c,
    occupied,
    predict,
    prefill_times,
    steps_of,
    typical_chunks,
    units_for,
    waiting,
    workers_for,
)
from tests.jaxserve.planner.making import H100, calculator, layout

LAYOUT = layout("ep", "h100", dp=2)
UNIT = DecodeUnit(LAYOUT, 50, (H100, H100), ((1.0, 0.02), (50.0, 0.04)))
WORKER = PrefillWorker(LAYOUT, 1000, H100)
STEPS = Steps(0.1, 0.1)
FOUR, UNLIKE = PrefillWorker(layout("ep", "h100", dp=4), 1000, H100), Steps(0.1, 0.3)
LINK = Handoff(token_bytes=1e5, bytes_per_second=1e9, latency=0.01, page=64)
REQUESTS = Demand(rate=5, prompt=1000, output=100).requests(2000, 64)


def test_littles_law():
    found = decoding(UNIT, 1, REQUESTS, 5.0)
    assert found.sequences == pytest.approx(5 * 100 * found.tpot)
    # Of s sequences, s / 2 a group: 0.02 + (s / 2 − 1) 0.02 / 49 = s / 500
    assert found.sequences == pytest.approx((0.02 - 0.02 / 49) / (1 / 500 - 0.01 / 49), rel=1e-3)


def test_more_than_the_slots():
    assert decoding(UNIT, 1, REQUESTS, 30.0) is None


def test_paces():
    assert UNIT.tpot(0) == 0.02
    assert UNIT.tpot(100) == 0.04
    assert UNIT.tpot(200) == pytest.approx(0.04 + 50 * 0.02 / 49)
    assert UNIT.sequences == 100
    assert UNIT.dollars == pytest.approx(2 * H100.price)


def test_as_many_units_as_it_takes():
    units = units_for(UNIT, REQUESTS, 200.0, Level(95.0, 0.03))
    for count, meets in ((units, True), (units - 1, False)):
        found = decoding(UNIT, count, REQUESTS, 200.0)
        fits = found is not None and UNIT.tpot(occupied(found.sequences, 95) / count) <= 0.03
        assert fits == meets
    assert units_for(UNIT, REQUESTS, 200.0, Level(95.0, 0.01)) is None


def test_a_request_that_waits_for_nobody():
    fleet = Fleet(WORKER, STEPS, 4, UNIT, 1)
    found = predict(fleet, LINK, REQUESTS, 0.01)
    crossing = 0.01 + 15 * 64 * 1e5 / 1e9
    assert found.parts["prefill"].p50 == pytest.approx(0.1, rel=0.01)
    assert found.parts["pages"].p50 == pytest.approx(crossing)
    assert 2 * 0.02 < found.parts["decode"].p50 < 3 * 0.02
    assert found.ttft.p50 == pytest.approx(0.1 + crossing + 2.5 * 0.02, rel=0.02)
    assert found.tpot.p50 == pytest.approx(0.02, rel=0.01)
    assert found.link_bytes == pytest.approx(0.01 * 960 * 1e5)


def test_what_is_short_is_named():
    fleet = Fleet(WORKER, STEPS, 1, UNIT, 1)
    slow = fleet._replace(units=9, steps=Steps(1.0, 1.0))
    narrow = Handoff(token_bytes=1e5, bytes_per_second=1e8, latency=0.01, page=64)
    for made, link, rate, reason in (
        (fleet, LINK, 30.0, "1 x 100 slots"),
        (fleet, narrow, 2.0, "the pages link"),
        (slow, LINK, 3.0, "1 prefill workers"),
    ):
        found = predict(made, link, REQUESTS, rate)
        assert isinstance(found, Overloaded)
        assert reason in found.reason


def test_workers_for_a_percentile():
    rest = REQUESTS.prompt * 0.0
    few = workers_for(WORKER, STEPS, rest, REQUESTS, 100.0, Level(50.0, 0.26))
    many = workers_for(WORKER, STEPS, rest, REQUESTS, 100.0, Level(99.0, 0.26))
    # Two groups a worker, a chunk in 0.1 s: at least 5 workers.
    assert 5 <= few < many
    assert workers_for(WORKER, STEPS, rest, REQUESTS, 100.0, Level(95.0, 0.05)) is None


def test_busy_groups():
    """n groups' steps: load × (alone + n (full − alone)) = n."""
    load = 2.0
    busy = UNLIKE.busy(load)
    assert busy == pytest.approx(load * UNLIKE.seconds(busy))
    assert UNLIKE.busy(10.0) == float("inf")


def test_equal_prompts():
    requests = Demand(rate=1, prompt=2500, output=1).requests(5000, 64)
    rate = 1.0
    times = prefill_times(FOUR, UNLIKE, requests, rate, 2)
    busy = UNLIKE.busy(rate * 2.5 / 8)
    assert times.step == pytest.approx(UNLIKE.seconds(busy))
    assert times.queue.busy == pytest.approx(rate * 2.5 * times.step / 8)
    # Three chunks, and one step and a half that others have begun or enqueued.
    waits = (1 - (1 - busy) ** 4) * 1.5
    assert times.compute == pytest.approx((3 + waits) * times.step)


def test_found_tokens_are_not_computed():
    plain = Demand(rate=1, prompt=3000, output=1).requests(5000, 64)
    found = Demand(rate=1, prompt=3000, output=1, hits=0.5).requests(5000, 64)
    ratio = capacity(FOUR, UNLIKE, found) / capacity(FOUR, UNLIKE, plain)
    assert ratio == pytest.approx(3000 / (3000 - 1472))
    assert capacity(FOUR, UNLIKE, plain) == pytest.approx(4 * 1000 / 0.3)


def test_too_many():
    requests = Demand(rate=1, prompt=2500, output=1).requests(5000, 64)
    # Four groups at 0.3 s a chunk take 5.3 such prompts a second.
    assert prefill_times(FOUR, UNLIKE, requests, 5.2, 1) is not None
    assert prefill_times(FOUR, UNLIKE, requests, 5.4, 1) is None


def test_steps_of_rooflines():
    """A full step is bound by compute: twice the tokens take nearly twice as long."""
    requests = Demand(rate=1, prompt=8192, output=1).requests(16384, 64)
    workers = [PrefillWorker(layout("tp", "h100", tp=4, ffn_tp=4), n, H100) for n in (2048, 4096)]
    found = [steps_of(worker, calculator("qwen3-32b"), requests).full for worker in workers]
    assert 1.6 < found[1] / found[0] < 2.1
    # 2 × 32.8 billion parameters a token, at 70 % of four H100's BF16, and attention beside it.
    least = 2 * 31.2e9 * 4096 / (4 * 989e12 * 0.7)
    assert least < found[1] < 2 * least


def test_fewer_groups_are_faster():
    requests = Demand(rate=1, prompt=4096, output=1).requests(8192, 64)
    steps = steps_of(FOUR, calculator("qwen3-30b-a3b"), requests)
    assert 0 < steps.alone < steps.full
    assert np.isfinite(steps.full)


def test_chunks_of_prompts():
    """2,500 tokens of which 500 are found: two chunks each, of 1,024 and 976."""
    requests = Demand(rate=1, prompt=2500, output=1, hits=0.2048).requests(5000, 64)
    assert set(requests.found) == {512 // 64 * 64}
    chunks = typical_chunks(requests, 1024)
    assert sorted(set(chunks)) == [Chunk(964, 2500), Chunk(1024, 1536)]
    assert chunks.count(Chunk(1024, 1536)) == len(chunks) / 2


def test_long_prompts_have_more_of_the_chunks():
    requests = Demand(rate=1, prompt=4000, output=1, spread=1.0).requests(64000, 64)
    chunks = typical_chunks(requests, 1000)
    exact = np.concatenate([np.arange(-(-own // 1000)) for own in requests.computed])
    before = np.mean([chunk.length - chunk.tokens for chunk in chunks])
    assert before == pytest.approx(1000 * exact.mean(), rel=0.1)


def test_formula_c():
    assert erlang_c(0.5, 1) == pytest.approx(0.5)
    # M/M/2 with load 1: 1/3.
    assert erlang_c(1.0, 2) == pytest.approx(1 / 3)
    # By its sum, for 10 servers with load 8.
    terms = [8.0**n / math.factorial(n) for n in range(10)]
    last = 8.0**10 / math.factorial(10) / (1 - 0.8)
    assert erlang_c(8.0, 10) == pytest.approx(last / (sum(terms) + last))


def test_one_server():
    """M/D/1 and M/M/1: ρ/(2(1 − ρ)) and ρ/(1 − ρ) services (Pollaczek and Khinchine)."""
    even = waiting(0.8, np.ones(4), 1)
    assert even.chance * even.mean == pytest.approx(0.8 / 0.4)
    random = np.array([0.0, 2.0])  # of variation 1
    varied = waiting(0.8, random, 1)
    assert varied.chance * varied.mean == pytest.approx(0.8 / 0.2)
    assert varied.busy == pytest.approx(0.8)


def test_too_many_requests_and_none():
    assert waiting(1.0, np.ones(3), 1) is None
    assert waiting(0.0, np.ones(3), 1) == Waiting(0.0, 0.0, 0.0)


def test_percentiles_of_waits():
    """M/M/1: the part that waits longer than t is ρ e^(−(1 − ρ) t)."""
    queue = waiting(0.5, np.array([0.0, 2.0]), 1)
    waits = queue.draw(np.random.default_rng(0), 200_000)
    assert np.mean(waits > 2) == pytest.approx(0.5 * math.exp(-1), abs=0.005)
