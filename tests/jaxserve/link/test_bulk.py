"""The checksum of arrays that follow a frame."""

import zlib

import numpy as np
import pytest

from jaxserve.link.bulk import CHECKED_WORDS, checksum

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
    known = checksum([data, data[:7]])
    for bit in range(8):
        data[place] ^= 1 << bit
        assert checksum([data, data[:7]]) != known
        data[place] ^= 1 << bit
    assert checksum([data, data[:7]]) == known


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
