"""Who works with whom, and how a difference is named."""

from jaxserve.link.session.hello import Hello, facts_digest, refusal

FACTS = {"model": "toy", "layers": "4", "dispatch": "fp8"}


def hello(worker: str, facts: dict[str, str], **fields) -> Hello:
    return Hello(worker=worker, facts=facts, **fields)


def test_equal_facts_in_another_order_fit() -> None:
    here = hello("ffn", FACTS)
    there = hello("attention", dict(reversed(FACTS.items())))
    assert refusal(here, there) == ""


def test_differing_and_missing_facts_are_named() -> None:
    theirs = {"model": "toy", "layers": "5", "gates": "yes"}
    assert refusal(hello("ffn", FACTS), hello("attention", theirs)) == (
        "attention is configured differently from ffn: layers = 5, here 4; "
        "dispatch = absent, here fp8; gates = yes, here absent"
    )


def test_at_most_four_facts_are_shown() -> None:
    ours, theirs = ({f"fact{i}": f"{i * side}" for i in range(1, 7)} for side in (1, 2))
    assert refusal(hello("a", ours), hello("b", theirs)) == (
        "b is configured differently from a: fact1 = 2, here 1; fact2 = 4, here 2; "
        "fact3 = 6, here 3; fact4 = 8, here 4; and 2 more"
    )


def test_the_protocol_comes_first() -> None:
    theirs = hello("attention", {}, protocol=8)
    assert refusal(hello("ffn", FACTS), theirs) == "protocol 8 of attention, 9 of ffn"


def test_a_format_that_one_end_cannot_compute_is_named_with_those_of_both() -> None:
    """An end that is configured for none takes any that it computes, but no other."""
    for asked, there, wanted, here, fits in (
        ("fp8", ["bf16", "fp8"], "fp8", ["bf16", "fp8"], True),
        ("fp8", ["bf16", "fp8"], "fp8", ["bf16"], False),
        ("fp8", ["bf16"], "fp8", ["bf16", "fp8"], False),
        ("fp8", ["bf16", "fp8"], "", ["fp8"], True),
        ("", ["bf16"], "fp8", ["bf16", "fp8"], False),
        ("", ["bf16"], "", ["fp8"], True),
    ):
        ours = hello("ffn", FACTS, formats={"link.combine": ("bf16", here), "rows": (wanted, here)})
        named = "attention is configured differently from ffn: rows = fp8, "
        named += f"computed there {there}, here {here}"
        theirs = hello("attention", FACTS, formats={"rows": (asked, there)})
        assert refusal(ours, theirs) == ("" if fits else named)


def test_digest_depends_on_keys_and_values() -> None:
    digests = {facts_digest(f) for f in ({"a": "b"}, {"a": "c"}, {"b": "a"}, {}, {"a": "b=c"})}
    assert len(digests) == 5
    assert all(len(digest) == 16 for digest in digests)
