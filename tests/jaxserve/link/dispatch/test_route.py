"""Every piece of a message has one place on the ffn mesh."""

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.link.dispatch.route import Route
from tests import golden

sizes = st.integers(1, 24)


def test_pieces_are_spread_over_the_devices():
    """Pieces come to their devices, then to the same devices of further instances."""

    def call(attention, ffn, instances=1):
        route = Route(attention, ffn, instances)
        assert route.slots == len(route.legs)
        return list(route.legs), route.filled

    golden.check_values("link/routes.txt", call, globals())


@given(sizes, sizes)
def test_every_piece_has_one_place(attention, ffn):
    route = Route(attention, ffn)
    assert len(set(route.filled)) == attention
    assert all(0 <= place < ffn * route.slots for place in route.filled)
    assert list(route.filled) == sorted(route.filled)  # rows keep their order
    crossings = [(a, f) for leg in route.legs for a, f in zip(leg.attention, leg.ffn, strict=True)]
    assert sorted(a for a, _ in crossings) == list(range(attention))
    for a, f in crossings:
        assert route.ingress(a)[0] == f


@given(sizes, sizes)
def test_a_leg_reaches_a_device_once_and_there_are_as_few_as_can_be(attention, ffn):
    """A leg is one copy: one wherever there are at least as many ffn devices as pieces."""
    legs = Route(attention, ffn).legs
    assert len(legs) == -(-attention // ffn)
    for leg in legs:
        assert list(leg.ffn) == sorted(set(leg.ffn))
        assert list(leg.attention) == sorted(set(leg.attention))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_every_answer_has_all_pieces(part, instances, own):
    route = Route(own * part * instances, part * instances, instances)
    reached = set()
    for answer in range(instances):
        legs = [leg for leg in route.legs if leg.answer == answer]
        pairs = [pair for leg in legs for pair in zip(leg.attention, leg.ffn, strict=True)]
        assert sorted(a for a, _ in pairs) == list(range(route.attention))
        reached |= {(a, f // part) for a, f in pairs}
    assert len(reached) == route.attention * instances
