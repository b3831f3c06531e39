"""Spans inferred by a merge: literal numbers, and invariants of any spans."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.observe.merging import answered, merge
from jaxserve.observe.spans import STAGES, AFDStage, Span
from jaxserve.observe.timeline import summarise

MS = 1_000_000


def ended(
    stage: AFDStage, end: int, *, lane: int = 0, layer: int = 0, step: int = 0, enqueued: int = 0
) -> Span:
    """A span as a process records it: it knows the end (in ms) and when it was enqueued."""
    return Span(stage, lane, layer, step, enqueued * MS, end * MS, 0, enqueued * MS)


def rows(spans: list[Span]) -> list[tuple[str, int, int, int, int]]:
    return [(s.stage, s.lane, s.layer, s.start_ns // MS, s.end_ns // MS) for s in spans]


# A lane's first two layers: attend 4 ms, dispatch 1, ffn 3, combine 1; a second lane in its gaps.
ATTENTION_PROCESS = [
    ended("attend", 4),
    ended("attend", 8, lane=1),
    ended("combine", 9),
    ended("combine", 13, lane=1),
    ended("attend", 13, layer=1),
    ended("attend", 17, lane=1, layer=1),
]
FFN_PROCESS = [
    ended("dispatch", 5),
    ended("ffn", 8),
    ended("dispatch", 9, lane=1),
    ended("ffn", 12, lane=1),
]


def test_a_span_starts_when_its_input_and_its_submesh_are_there() -> None:
    assert rows(merge([ATTENTION_PROCESS, FFN_PROCESS])) == [
        ("attend", 0, 0, 0, 4),
        ("dispatch", 0, 0, 4, 5),
        ("attend", 1, 0, 4, 8),
        ("ffn", 0, 0, 5, 8),
        ("combine", 0, 0, 8, 9),
        ("dispatch", 1, 0, 8, 9),
        ("ffn", 1, 0, 9, 12),
        ("attend", 0, 1, 9, 13),
        ("combine", 1, 0, 12, 13),
        ("attend", 1, 1, 13, 17),
    ]


def test_a_pass_gets_the_lane_whose_message_it_answered() -> None:
    """Recording ended between attend and combine of a lane, which an ffn worker cannot know."""
    passes = [ended("ffn", end, lane=0, step=9) for end in (8, 12, 20)]
    found = answered(passes, ATTENTION_PROCESS)
    assert [(span.lane, span.step) for span in found] == [(0, 0), (1, 0), (-1, 9)]


def test_merging_merged_spans_changes_nothing() -> None:
    merged = merge([ATTENTION_PROCESS, FFN_PROCESS])
    assert merge([merged]) == merged


def test_a_span_does_not_start_before_it_was_enqueued() -> None:
    spans = merge([[ended("attend", 4), ended("attend", 12, step=1, enqueued=10)]])
    assert rows(spans) == [("attend", 0, 0, 0, 4), ("attend", 0, 0, 10, 12)]


def test_a_clock_that_runs_behind_gives_an_empty_span_and_not_a_negative_one() -> None:
    spans = merge([[ended("attend", 10)], [ended("dispatch", 9)]])
    assert rows(spans) == [("attend", 0, 0, 0, 10), ("dispatch", 0, 0, 9, 9)]


spans_of_anything = st.lists(
    st.builds(
        ended,
        st.sampled_from(STAGES),
        st.integers(0, 50),
        lane=st.integers(0, 2),
        layer=st.integers(0, 3),
        step=st.integers(0, 3),
        enqueued=st.integers(0, 50),
    ),
    max_size=40,
)


@given(spans_of_anything)
def test_spans_of_one_stage_never_overlap_and_never_precede_their_cause(spans: list[Span]) -> None:
    merged = merge([spans])
    assert len(merged) == len(spans)
    for stage in STAGES:
        one = sorted((s.end_ns, s.start_ns) for s in merged if s.stage == stage)
        assert all(start <= end for end, start in one)
        assert all(start >= end for (end, _), (_, start) in pairwise(one))
    summary = summarise(merged)
    assert 0 <= summary.attention_busy <= 1
    assert 0 <= summary.ffn_busy <= 1
    assert 0 <= summary.bubble <= 1
