"""Both ends' arithmetic agrees with the formats that the programs use."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.checkpoint.families import architecture
from jaxserve.link.dispatch.contract import Contract, Leg, Route
from jaxserve.link.dispatch.message import message_formats
from jaxserve.model.ffn.traffic import deployment_row_bytes
from tests import golden
from tests.jaxserve import layouts


def contract(tmp_path, **overrides):
    deployment = layouts.deployment(
        tmp_path, {k.replace("__", "."): v for k, v in overrides.items()}
    )
    return Contract.of(architecture(layouts.SIZES.config()), deployment)


@pytest.mark.parametrize("dispatch", ["float32", "fp8", "int8"])
def test_rows_have_the_bytes_that_capacity_counts(dispatch, tmp_path):
    deployment = layouts.deployment(tmp_path, {"link.dispatch": dispatch})
    config = architecture(layouts.SIZES.config())
    formats = message_formats(Contract.of(config, deployment))
    assert list(formats) == ["dense", "moe"]
    counted = deployment_row_bytes(config, deployment).packed
    assert counted == formats["moe"].width * formats["moe"].word.itemsize


def test_pieces(tmp_path):
    made = contract(tmp_path, attention__dp=3, attention__tp=2)
    assert made.attention_devices == 6
    assert made.piece_rows(24) == 12
    assert made.size(24) == (6, 12)
    assert made.of_pieces(2).size(24) == (2, 24)
    with pytest.raises(ValueError, match="69 rows cannot be cut into 6 equal pieces"):
        made.piece_rows(23)


def test_the_ffn_mesh_changes_nothing(tmp_path):
    small = contract(tmp_path, attention__dp=2)
    wide = contract(tmp_path, attention__dp=2, ffn__ep=5, ffn__tp=3)
    assert small == wide
    assert small.digest() == wide.digest()


def test_domains_of_other_sizes_agree(tmp_path):
    """One ffn worker serves them all."""
    assert contract(tmp_path).facts() == contract(tmp_path, attention__dp=3).facts()


def test_every_difference_changes_the_digest(tmp_path):
    made = contract(tmp_path)
    changes = [{"d_model": 32}, {"top_k": 1}, {"dispatch": "int8"}, {"layers": ("moe",)}]
    changes += [{"combine": "bfloat16"}, {"combine": "int8"}]
    digests = {msgspec.structs.replace(made, **change).digest() for change in ({}, *changes)}
    assert len(digests) == 7


sizes = st.integers(1, 24)


def test_pieces_are_spread_over_the_devices():
    def call(attention, ffn):
        route = Route(attention, ffn)
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


def test_two_instances_get_every_piece():
    """Devices 0 and 1 are one, 2 and 3 the other; a piece comes to its device, then to the same one
    of the other."""
    route, pieces = Route(attention=4, ffn=4, instances=2), (0, 1, 2, 3)
    assert route.legs == (Leg(0, 0, pieces, pieces), Leg(1, 1, pieces, (2, 3, 0, 1)))
    assert (route.slots, route.filled) == (2, pieces)


def test_two_instances_of_a_device_with_two_pieces_each():
    route = Route(attention=4, ffn=2, instances=2)
    assert [(leg.slot, leg.answer) for leg in route.legs] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    pairs = [tuple(zip(leg.attention, leg.ffn, strict=True)) for leg in route.legs]
    assert pairs == [((0, 0), (2, 1)), ((1, 0), (3, 1)), ((0, 1), (2, 0)), ((1, 1), (3, 0))]


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
