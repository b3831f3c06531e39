import numpy as np

from jaxserve.roles.batch_layout import BatchLayout, RulesLayout


def test_fields_of_modules_come_last():
    """3 tokens, 2 slots; the order of the others is that of `test_step_arrays.py`."""
    layout = BatchLayout(3, 2, modules=3)
    assert layout.width == 3 + 3 + 2 * 7 + 2 * 3
    assert layout.fields(np.arange(layout.width))["upcoming"].tolist() == [20, 21, 22, 23, 24, 25]


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
