from jaxserve.bench.sampling import part_of

SECONDS = {
    "1 greedy": [0.03, 0.02],
    "1 temperature": [0.025, 0.09],
    "1 top_k and top_p": [0.03, 0.04],
    "32 greedy": [0.2, 0.1],
    "32 temperature": [0.15, 0.14],
    "32 top_k and top_p": [0.4, 0.2],
}


def test_the_best_rounds_are_compared() -> None:
    part = part_of(SECONDS, rounds=2)
    assert [(m.name.strip(), round(m.value, 2), m.met) for m in part.measures] == [
        ("1 sequences: greedy", 20.0, None),
        ("temperature ÷ greedy", 1.25, True),
        ("top_k and top_p ÷ greedy", 1.5, None),
        ("32 sequences: greedy", 100.0, None),
        ("temperature ÷ greedy", 1.4, False),
        ("top_k and top_p ÷ greedy", 2.0, None),
    ]
