"""A prefill worker's times, with steps of given durations."""

import numpy as np
import pytest

from jaxserve.planner.deploy_demand import Demand
from jaxserve.planner.deploy_prefill import (
    Chunk,
    PrefillWorker,
    Steps,
    capacity,
    prefill_times,
    steps_of,
    typical_chunks,
)
from tests.jaxserve.planner.making import H100, calculator, layout

WORKER = PrefillWorker(layout("ep", "h100", dp=4), 1000, H100)
STEPS = Steps(0.1, 0.3)


def test_busy_groups():
    """n groups' steps: load × (alone + n (full − alone)) = n."""
    load = 2.0
    busy = STEPS.busy(load)
    assert busy == pytest.approx(load * STEPS.seconds(busy))
    assert STEPS.busy(10.0) == float("inf")


def test_equal_prompts():
    requests = Demand(rate=1, prompt=2500, output=1).requests(5000, 64)
    rate = 1.0
    times = prefill_times(WORKER, STEPS, requests, rate, 2)
    busy = STEPS.busy(rate * 2.5 / 8)
    assert times.step == pytest.approx(STEPS.seconds(busy))
    assert times.queue.busy == pytest.approx(rate * 2.5 * times.step / 8)
    # Three chunks, and one step and a half that others have begun or enqueued.
    waits = (1 - (1 - busy) ** 4) * 1.5
    assert times.compute == pytest.approx((3 + waits) * times.step)


def test_found_tokens_are_not_computed():
    plain = Demand(rate=1, prompt=3000, output=1).requests(5000, 64)
    found = Demand(rate=1, prompt=3000, output=1, hits=0.5).requests(5000, 64)
    ratio = capacity(WORKER, STEPS, found) / capacity(WORKER, STEPS, plain)
    assert ratio == pytest.approx(3000 / (3000 - 1472))
    assert capacity(WORKER, STEPS, plain) == pytest.approx(4 * 1000 / 0.3)


def test_too_many():
    requests = Demand(rate=1, prompt=2500, output=1).requests(5000, 64)
    # Four groups at 0.3 s a chunk take 5.3 such prompts a second.
    assert prefill_times(WORKER, STEPS, requests, 5.2, 1) is not None
    assert prefill_times(WORKER, STEPS, requests, 5.4, 1) is None


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
    steps = steps_of(WORKER, calculator("qwen3-30b-a3b"), requests)
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
