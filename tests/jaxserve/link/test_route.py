from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.link.route import Edge, Route, combine_route, dispatch_route, rounds

sides = st.integers(1, 6)
kinds = st.sampled_from(["trampoline", "broadcast"])


def test_trampoline_from_3_to_2():
    """Six pieces: each sender cuts its rows in two, each receiver joins three."""
    assert dispatch_route(3, 2, "trampoline") == Route(
        senders=3,
        receivers=2,
        sends=2,
        receives=3,
        edges=(
            Edge(source=0, output=0, destination=0, input=0),
            Edge(source=0, output=1, destination=0, input=1),
            Edge(source=1, output=0, destination=0, input=2),
            Edge(source=1, output=1, destination=1, input=0),
            Edge(source=2, output=0, destination=1, input=1),
            Edge(source=2, output=1, destination=1, input=2),
        ),
    )


def test_trampoline_back_from_2_to_3():
    assert combine_route(3, 2, "trampoline") == Route(
        senders=2,
        receivers=3,
        sends=3,
        receives=2,
        edges=(
            Edge(0, 0, 0, 0),
            Edge(0, 1, 0, 1),
            Edge(0, 2, 1, 0),
            Edge(1, 0, 1, 1),
            Edge(1, 1, 2, 0),
            Edge(1, 2, 2, 1),
        ),
    )


def test_broadcast_from_3_to_2():
    """One array a sender; a receiver's inputs are the senders, in their order."""
    assert dispatch_route(3, 2, "broadcast") == Route(
        senders=3,
        receivers=2,
        sends=1,
        receives=3,
        edges=(
            Edge(0, 0, 0, 0),
            Edge(0, 0, 1, 0),
            Edge(1, 0, 0, 1),
            Edge(1, 0, 1, 1),
            Edge(2, 0, 0, 2),
            Edge(2, 0, 1, 2),
        ),
    )


def test_broadcast_back_from_2_to_3():
    assert combine_route(3, 2, "broadcast") == Route(
        senders=2,
        receivers=3,
        sends=3,
        receives=2,
        edges=(
            Edge(0, 0, 0, 0),
            Edge(0, 1, 1, 0),
            Edge(0, 2, 2, 0),
            Edge(1, 0, 0, 1),
            Edge(1, 1, 1, 1),
            Edge(1, 2, 2, 1),
        ),
    )


@given(sides, sides)
def test_trampoline_carries_every_row_exactly_once_and_in_order(attention, ffn):
    for route in (
        dispatch_route(attention, ffn, "trampoline"),
        combine_route(attention, ffn, "trampoline"),
    ):
        piece = {}  # place in the receivers' rows -> place in the senders' rows
        for edge in route.edges:
            sent = edge.source * route.sends + edge.output
            arrived = edge.destination * route.receives + edge.input
            assert arrived not in piece
            piece[arrived] = sent
        assert piece == {place: place for place in range(route.senders * route.sends)}


@given(sides, sides)
def test_broadcast_reaches_every_ffn_device_and_comes_back_from_all(attention, ffn):
    dispatch = dispatch_route(attention, ffn, "broadcast")
    expected = {(a, 0, f, a) for a in range(attention) for f in range(ffn)}
    assert {tuple(edge) for edge in dispatch.edges} == expected
    assert len(dispatch.edges) == len(expected)
    combine = combine_route(attention, ffn, "broadcast")
    expected = {(f, a, a, f) for a in range(attention) for f in range(ffn)}
    assert {tuple(edge) for edge in combine.edges} == expected
    assert len(combine.edges) == len(expected)


@given(sides, sides, kinds)
def test_every_output_leaves_and_every_input_is_filled_once(attention, ffn, kind):
    for route in (dispatch_route(attention, ffn, kind), combine_route(attention, ffn, kind)):
        inputs = Counter((edge.destination, edge.input) for edge in route.edges)
        assert inputs == {(r, i): 1 for r in range(route.receivers) for i in range(route.receives)}
        outputs = {(edge.source, edge.output) for edge in route.edges}
        assert outputs == {(s, o) for s in range(route.senders) for o in range(route.sends)}


@given(sides, sides, kinds)
def test_rounds_are_matchings_that_cover_all_edges(attention, ffn, kind):
    for route in (dispatch_route(attention, ffn, kind), combine_route(attention, ffn, kind)):
        every = rounds(route)
        assert sorted(edge for edges in every for edge in edges) == sorted(route.edges)
        for edges in every:
            assert len({edge.source for edge in edges}) == len(edges)
            assert len({edge.destination for edge in edges}) == len(edges)


def test_rounds_from_3_to_2():
    route = dispatch_route(3, 2, "trampoline")
    assert [[edge[:3:2] for edge in edges] for edges in rounds(route)] == [
        [(0, 0), (1, 1)],
        [(0, 0), (2, 1)],
        [(1, 0), (2, 1)],
    ]


@pytest.mark.parametrize(
    ("attention", "ffn", "kind", "whole"),
    [
        (1, 1, "trampoline", True),
        (1, 1, "broadcast", True),
        (4, 4, "trampoline", True),
        (2, 2, "broadcast", False),
        (1, 2, "trampoline", False),
        (2, 1, "trampoline", False),
        (1, 2, "broadcast", False),
    ],
)
def test_a_message_crosses_whole_where_device_i_sends_to_device_i(attention, ffn, kind, whole):
    assert dispatch_route(attention, ffn, kind).whole is whole
    assert combine_route(attention, ffn, kind).whole is whole
