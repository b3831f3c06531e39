"""The suite for plain XLA."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import paged_attention, reference
from pallas_kernels.target import Target
from tests.pallas_kernels.attention.suite import PADDING, RotatedPartSuite, Sizes


class TestReference(RotatedPartSuite):
    target = Target("reference", "cpu")

    @pytest.fixture(autouse=True)
    def few_positions(self, monkeypatch):
        monkeypatch.setattr(reference, "PRODUCT_TOKENS", self.products)

    @pytest.mark.parametrize("tokens", [2, 0])
    @pytest.mark.parametrize("sizes", [Sizes(), Sizes(shared=True, cache="int8", window=40)])
    def test_tokens_in_parts(self, sizes, tokens, monkeypatch):
        """Two tokens at a time, the last one with padding, or not even room for one; more than one
        block of positions."""
        monkeypatch.setattr(reference, "GATHERED_BYTES", tokens * 128 * 32 * 4)
        self.check(self.case(sizes, [(9 * self.page_size + 3, 2), (130, 1), (1, 1), (3, 1)]))

    @pytest.mark.parametrize(
        "sizes",
        [
            Sizes(kv_heads=2, window=20),
            Sizes(shared=True, cache="int8", window=40),
            Sizes(q_heads=2, kv_heads=2, cache="fp8"),
        ],
    )
    def test_tiles(self, sizes, monkeypatch):
        """Tiles of four tokens: of one chunk, of two, of single tokens, of a chunk with padding,
        and one that is not full. Tokens of a sequence share blocks, single ones do not."""
        monkeypatch.setattr(reference, "TILE_TOKENS", 4)
        monkeypatch.setattr(reference, "SHARING_TOKENS", 2)
        page = self.page_size
        chunks = [(9 * page + 3, 6), (130, 2), (3, 1), (page, 1), (7, 1), (1, 1), PADDING, (5, 5)]
        self.check(self.case(sizes, chunks))


@pytest.mark.parametrize("tokens", [8, 64, 130])
def test_a_scan_over_layers_copies_no_pages(tokens):
    """Temporary memory does not grow with the pool, which the scan carries and its layers write."""

    def layers(rows, pages, table, place):
        def layer(state, page):
            new, at = (state[0][:, :1],) * 2, (table + page, place, place)
            pages = reference.write_rows(state[1], new, *at)
            return (paged_attention(state[0], *pages, *at, scale=1.0)[0], pages), None

        return jax.lax.scan(layer, (rows, pages), jnp.arange(3))[0]

    pool = jax.ShapeDtypeStruct((9000, 1, 16, 32), "float32")
    rows, table, place = jnp.zeros((tokens, 4, 32)), jnp.zeros((4, 9), int), jnp.zeros(tokens, int)
    run = jax.jit(layers, donate_argnums=1).lower(rows, (pool, pool), table, place).compile()
    assert run.memory_analysis().temp_size_in_bytes < 4e6  # a pool has 18 MB
