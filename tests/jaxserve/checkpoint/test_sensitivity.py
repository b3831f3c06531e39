"""The choice of layers by what they cost; `test_convert.py` has the measurement."""

from jaxserve.checkpoint.sensitivity import ProductLoss, longest, prefixes

ALONE = [
    ProductLoss([0], 3e-4, 0.02, 0.01),
    ProductLoss([1], 1e-4, -0.5, 0.01),
    ProductLoss([2], 9e-4, 0.2, 0.0),
    ProductLoss([3], 2e-4, 0.0, 0.03),
]


def test_layers_are_tried_from_the_least_sensitive_on_if_they_are_within_the_budget():
    assert ALONE[1].most == 0.02  # chance does not make room
    assert prefixes(ALONE, 0.06) == [{1}, {1, 3}, {0, 1, 3}]
    assert prefixes(ALONE, 0.05) == [{1}, {0, 1}]
    assert prefixes(ALONE, 0.01) == []


def test_the_list_is_shortened_until_it_is_within_the_budget():
    together = [
        ProductLoss([1], 1e-4, 0.01, 0.0),
        ProductLoss([1, 3], 3e-4, 0.03, 0.01),
        ProductLoss([0, 1, 3], 6e-4, 0.05, 0.01),
    ]
    assert longest(together, 0.06) == together[1]
    assert longest(together, 0.1) == together[2]
    assert longest(together, 0.001) is None
