"""The words of the bench."""

import pytest

from jaxserve.bench.drafts import part_of


def samples(one: list[float], many: list[float], **more) -> dict:
    counts = {"runs": 0, "drafted": 0, "accepted": [], "compilations": 0}
    return {"tokens_per_second": {"1": one, "32": many}} | counts | more


def test_ratios_are_of_rounds_and_tokens_of_verified_steps():
    part = part_of(
        {
            "none": samples([100.0, 50.0, 80.0], [1000.0, 400.0, 800.0]),
            "ngram, 3 drafts": samples([90.0, 60.0, 80.0], [900.0, 500.0, 700.0], runs=10),
            "mtp, 1 draft": samples(
                [140.0, 100.0, 80.0], [900.0, 400.0, 800.0], runs=10, drafted=10, accepted=[7]
            ),
        }
    )
    found = [(measure.name.strip(), measure.value, measure.met) for measure in part.measures]
    assert found == [
        ("none: 1 sequence", 80.0, None),
        ("none: 32 sequences", 800.0, None),
        ("compiled after ready", 0, True),
        ("ngram, 3 drafts: tokens a drafted step and sequence", 1.0, None),
        ("1 sequence", 80.0, None),
        ("÷ none", 1.0, True),
        ("32 sequences", 700.0, None),
        ("÷ none", 0.9, False),
        ("compiled after ready", 0, True),
        ("mtp, 1 draft: tokens a drafted step and sequence", pytest.approx(1.7), True),
        ("draft 1 held", pytest.approx(70.0), None),
        ("1 sequence", 100.0, None),
        ("÷ none", pytest.approx(1.4), True),
        ("32 sequences", 800.0, None),
        ("÷ none", 1.0, True),
        ("compiled after ready", 0, True),
    ]
