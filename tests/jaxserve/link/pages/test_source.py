"""Names of a hand-off."""

import itertools

import msgspec
import pytest

from jaxserve.link.pages.connection import _ranges
from jaxserve.link.pages.frames import pages_digest
from jaxserve.link.pages.source import NOTHING_HELD, PagesSource


def test_a_source_crosses_the_router():
    source = PagesSource("10.0.0.1:7000", "a1b2", 48, "00ff", 3)
    encoded = msgspec.msgpack.encode(source)
    assert msgspec.msgpack.decode(encoded, type=PagesSource) == source
    assert NOTHING_HELD.tokens == 0


def test_the_digest_is_of_tokens_number_model_and_format():
    known = pages_digest([1, 2, 3], "m", "fp8")
    assert known == pages_digest((1, 2, 3), "m", "fp8")
    others = [pages_digest(ids, "m", "fp8") for ids in ([1, 2, 4], [1, 2])]
    others += [pages_digest([1, 2, 3], *other) for other in (("n", "fp8"), ("m", "int8"))]
    assert len({known, *others}) == 5
    assert len(known) == 16


@pytest.mark.parametrize(
    ("start", "stop", "sizes"),
    [(0, 300, [128, 128, 32, 32]), (0, 250, [128, 128]), (16, 32, [32]), (32, 128, [32, 32, 32])],
)
def test_pieces_of_a_range(start, stop, sizes):
    ranges = _ranges(start, stop, [32, 128])
    assert [one.size for one in ranges] == sizes
    assert [ranges[0].start, ranges[-1].stop] == [start, stop]
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))
