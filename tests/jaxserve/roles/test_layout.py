import numpy as np
import pytest

from jaxserve.roles.layout import BatchLayout, RulesLayout


def test_fields_in_order():
    """3 tokens, 2 slots."""
    layout = BatchLayout(3, 2)
    assert layout.width == 3 + 3 + 2 * 7
    fields = layout.fields(np.arange(layout.width))
    assert {name: field.tolist() for name, field in fields.items()} == {
        "token_ids": [0, 1, 2],
        "query_start": [3, 4, 5],
        "kv_length": [6, 7],
        "sample": [8, 9],
        "temperature": [10, 11],
        "top_k": [12, 13],
        "top_p": [14, 15],
        "min_p": [16, 17],
        "seed": [18, 19],
        "upcoming": [],
    }
    layout = BatchLayout(3, 2, modules=3)
    assert layout.width == 20 + 2 * 3
    assert layout.fields(np.arange(layout.width))["upcoming"].tolist() == [20, 21, 22, 23, 24, 25]


@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (8, 8), (128, 5)])
def test_fields_fill_the_width(tokens, slots):
    layout = BatchLayout(tokens, slots)
    fields = layout.fields(np.zeros(layout.width))
    assert sum(len(field) for field in fields.values()) == layout.width


def test_fields_are_views():
    row = np.zeros(BatchLayout(2, 1).width, np.int32)
    BatchLayout(2, 1).fields(row)["seed"][0] = 5
    assert row[-1] == 5


def test_rules_in_order():
    """A vocabulary of 70 tokens: bitmasks of three words."""
    layout = RulesLayout(70)
    assert layout.width == 7 + 2 * 384 + 2 * 3
    fields = layout.fields(np.arange(2 * layout.width).reshape(2, -1))
    assert fields["temperature"].tolist() == [[0], [781]]
    assert fields["masked"].tolist() == [[6], [787]]
    assert fields["token_ids"].shape == fields["biases"].shape == (2, 384)
    assert fields["allowed"][0].tolist() == [775, 776, 777]
    assert fields["prompt"][0].tolist() == [778, 779, 780]
