"""MFA alone, against NumPy: several ragged sequences at once, whole and in pieces."""

import numpy as np
import pytest

from tests.jaxserve.model.attention.layers import EXACT, MIXED_STEPS, FamilySuite, check, in_pieces
from tests.reference.tiny_step3 import TinyStep3

pytestmark = pytest.mark.unoptimised


class TestMFA(FamilySuite):
    variants = {"plain": TinyStep3(num_hidden_layers=1, moe_layers=())}  # noqa: RUF012

    def test_shares_of_the_heads_add_up(self):
        """tp 2: each device has half of the query heads, and all of K and V."""
        layer = self.layer(tp=2)
        check(in_pieces(layer, self.x, MIXED_STEPS), self.expected(), EXACT)
        for pages in layer.pages:
            assert pages.shape == (12, 2, 4, 32)
            np.testing.assert_array_equal(pages[:, 1], pages[:, 0])
