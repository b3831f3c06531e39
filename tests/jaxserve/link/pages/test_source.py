"""What names a hand-off."""

import itertools
import zlib

import msgspec
import numpy as np
import pytest

from jaxserve.link.pages.bytes import CHECKED_WORDS, checksum
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


ROW = 8 * CHECKED_WORDS


def test_the_checksum_is_that_of_column_sums():
    """Written out for one row and five bytes, and two words that overflow."""
    data = np.arange(2 * ROW + 5, dtype=np.uint8)
    data[:8] = data[ROW : ROW + 8] = 255
    sums = [
        sum(
            int.from_bytes(data[ROW * row + 8 * column :][:8].tobytes(), "little") for row in (0, 1)
        )
        for column in range(CHECKED_WORDS)
    ]
    columns = b"".join((each % 2**64).to_bytes(8, "little") for each in sums)
    assert checksum([data]) == zlib.crc32(columns + data[-5:].tobytes())
    assert checksum([]) == 0


@pytest.mark.parametrize("place", [0, ROW - 1, ROW, 3 * ROW - 1, 3 * ROW, 3 * ROW + 9])
def test_the_checksum_notices_a_bit(place):
    data = np.random.default_rng(0).integers(0, 256, 3 * ROW + 10, np.uint8)
    known = checksum([data, data[:7]], b"of")
    for bit in range(8):
        data[place] ^= 1 << bit
        assert checksum([data, data[:7]], b"of") != known
        data[place] ^= 1 << bit
    assert checksum([data, data[:7]], b"of") == known
    assert checksum([data, data[:7]], b"if") != known


@pytest.mark.parametrize("distance", [8, 4096, 65536])
def test_the_checksum_notices_what_stands_elsewhere(distance):
    """Two pages of memory that have changed places, and a page that was not written."""
    data = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
    known = checksum([data])
    for changed in (data.copy(), data.copy()):
        first, second = slice(0, distance), slice(distance, 2 * distance)
        changed[first], changed[second] = data[second], data[first]
        assert checksum([changed]) != known
    lost = data.copy()
    lost[:distance] = 0
    assert checksum([lost]) != known


@pytest.mark.parametrize(
    ("start", "stop", "sizes"),
    [(0, 300, [128, 128, 32, 32]), (0, 250, [128, 128]), (16, 32, [32]), (32, 128, [32, 32, 32])],
)
def test_pieces_of_a_range(start, stop, sizes):
    ranges = _ranges(start, stop, [32, 128])
    assert [one.size for one in ranges] == sizes
    assert [ranges[0].start, ranges[-1].stop] == [start, stop]
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))
