"""What names a hand-off."""

import msgspec

from jaxserve.link.pages import NOTHING_HELD, PagesSource, pages_digest


def test_a_source_crosses_the_router():
    source = PagesSource("10.0.0.1:7000", "a1b2", 48, "00ff", 3)
    encoded = msgspec.msgpack.encode(source)
    assert msgspec.msgpack.decode(encoded, type=PagesSource) == source
    assert NOTHING_HELD.tokens == 0


def test_the_digest_is_of_tokens_number_model_and_format():
    known = pages_digest([1, 2, 3], "m", "fp8")
    assert known == pages_digest((1, 2, 3), "m", "fp8")
    others = [
        pages_digest([1, 2, 4], "m", "fp8"),
        pages_digest([1, 2], "m", "fp8"),
        pages_digest([1, 2, 3], "n", "fp8"),
        pages_digest([1, 2, 3], "m", "int8"),
    ]
    assert len({known, *others}) == 5
    assert len(known) == 16
