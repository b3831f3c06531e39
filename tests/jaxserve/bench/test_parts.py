"""How the parts of the bench evaluate their samples; the storms and loops are run by hand."""

import pytest

from jaxserve.bench import compare, drafts
from jaxserve.bench.pipelines import ideal_gains
from jaxserve.bench.report import table
from tests import golden


def drafted(one: list[float], many: list[float], **more) -> dict:
    counts = {"runs": 0, "accepted": [], "compilations": 0}
    return {"tokens_per_second": {"1": one, "32": many}} | counts | more


def test_drafts_are_compared_round_by_round_and_by_verified_steps():
    one, many = [140.0, 100.0, 80.0], [900.0, 400.0, 800.0]
    part = drafts.part_of(
        {
            "none": drafted([100.0, 50.0, 80.0], [1000.0, 400.0, 800.0]),
            "ngram, 3 drafts": drafted([90.0, 60.0, 80.0], [900.0, 500.0, 700.0], runs=10),
            "mtp, 1 draft": drafted(one, many, runs=10, accepted=[7]),
        }
    )
    golden.check("bench/drafts.txt", table(part) + "\n")


def test_a_prompt_counts_its_own_tokens_and_a_batch_what_it_generates():
    seconds = {"ours": [2.0, 1.0], "transformers": [4.0, 3.0], "llama.cpp": [2.0, 2.0]}
    seconds |= {"same": {"transformers": 1.0, "llama.cpp": 0.5}}
    targets = {"transformers": 4.0, "llama.cpp": 1.2}
    batches = [compare.Batch(8, 16, 64, targets), compare.Batch(1, 512, 1, targets)]
    found = {batch.name: seconds for batch in batches}
    found["ours"] = {"seconds": 3.0, "sizes": "colocated, 32 slots"}
    found |= {"transformers": {"torch": "2.15"}, "llama.cpp": {"llama_cpp": "0.3"}}
    golden.check("bench/compare.txt", table(compare.part_of(found, batches, "in FP32")) + "\n")


@pytest.mark.parametrize(
    ("attend", "ffn", "link", "two", "three"),
    [
        (2.0, 2.0, 0.0, 2.0, 2.0),  # balanced, nothing on the way: two lanes are enough
        (2.0, 2.0, 1.0, 2.0, 2.5),  # the link is a third stage
        (2.0, 2.0, 2.0, 2.0, 3.0),  # three equal stages, one for each lane
        (3.0, 1.0, 0.0, 4 / 3, 4 / 3),  # attention is all that counts
        (2.0, 2.0, 4.0, 2.0, 2.0),  # the link is the bottleneck
    ],
)
def test_gains_that_lanes_are_measured_against(attend, ffn, link, two, three):
    assert ideal_gains(attend, ffn, link) == pytest.approx({2: two, 3: three})
