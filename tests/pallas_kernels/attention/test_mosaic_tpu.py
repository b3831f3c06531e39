"""The suite for the Mosaic TPU kernel, interpreted, with its races looked for."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import mosaic_tpu, mosaic_tpu_kernel, paged_attention, tiles
from pallas_kernels.attention.mosaic_tpu_fetch import Fetcher
from pallas_kernels.attention.mosaic_tpu_short import ShortKernel
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.attention.suite import PADDING, RotatedPartSuite, Sizes
from tests.pallas_kernels.tpu_races import no_race, race_is_reported  # noqa: F401

pytestmark = pytest.mark.unoptimised

TINY = Target("mosaic_tpu", "TPU7x tiny", interpret=True)


@pytest.fixture
def several(monkeypatch):
    """Blocks that hold all keys of a token; two tokens at a time, in as few buffers as do."""
    monkeypatch.setattr(tiles, "TPU", tiles.TpuTiles(4096, 16, 32))
    monkeypatch.setattr("pallas_kernels.attention.mosaic_tpu_memory.MOST_TOGETHER", 2)
    monkeypatch.setattr("pallas_kernels.attention.mosaic_tpu_memory.AHEAD_BYTES", 0)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Blocks of two pages, items of four tokens in tiles of two."""
    row = tiles.TpuTiles(block_tokens=32, tile_rows=16, item_rows=32)
    monkeypatch.setattr(tiles, "TPU", row)


@pytest.mark.usefixtures("no_race")
class TestMosaicTpu(RotatedPartSuite):
    target = TINY

    products = 16

    @pytest.fixture(autouse=True)
    def parts_of_a_block(self, monkeypatch):
        monkeypatch.setattr(mosaic_tpu_kernel, "PRODUCT_TOKENS", self.products)

    @pytest.mark.parametrize("shared", [True, False], ids=["latent", "two heads"])
    def test_fp8_meets_bfloat16_as_it_is(self, shared):
        """Lengths of a block less one and partial blocks, a draft, a window; whole blocks too."""
        sizes = Sizes(
            kv_heads=1 if shared else 2, head_dim=24, shared=shared, cache="fp8", window=72
        )
        chunks = [(9 * self.page_size - 1, 1), PADDING, (5, 1), (8 * self.page_size, 3)]
        self.check(self.case(sizes, chunks, dtype=jnp.bfloat16), tolerance=0.01)

    @pytest.mark.parametrize(
        ("sizes", "pages"),
        [
            (Sizes(kv_heads=2, v_width=24), 10),
            (Sizes(q_heads=16, shared=True, head_dim=24, cache="fp8"), 8),
            (Sizes(shared=True, head_dim=24, rope=8, cache="int8", products=16), 3),
            (Sizes(kv_heads=2, cache="fp8", window=20), 10),
        ],
        ids=["two heads", "a block of 128", "products in INT8", "window"],
    )
    def test_tokens_whose_keys_are_one_block(self, sizes, pages, several):
        """Seven rounds of two tokens, which use buffers again; padding between and behind them."""
        chunks = [(length, 1) for length in (1, 15, 16, 17, 31, 32, 33, 40, 41, 47, 48)]
        chunks = [*chunks[:5], PADDING, *chunks[5:], PADDING, PADDING]
        dtype = jnp.bfloat16 if sizes.window else jnp.float32
        case = self.case(sizes, chunks, pages_per_sequence=pages, dtype=dtype)
        *arrays, table, sequence, position = case.arguments
        arguments = (*arrays, jnp.pad(table, ((0, 3), (0, 0))), sequence, position)
        tolerance = 0.01 if sizes.products or sizes.window else 1e-5
        self.check(case._replace(arguments=arguments), tolerance)

    @pytest.mark.parametrize("wait", ["await_block", "await_pages", "receive", "await_results"])
    def test_a_wait_that_is_left_out_is_a_race(self, wait, monkeypatch, request):
        """Copies that happen at once, so that leaving out a wait does not leave out the copy."""
        at_once = dataclasses.replace(mosaic_tpu.INTERPRETER, dma_execution_mode="eager")
        monkeypatch.setattr(mosaic_tpu, "INTERPRETER", at_once)
        owner, chunks = Fetcher, [(9 * self.page_size + 3, 1)]
        if hasattr(ShortKernel, wait):
            owner = ShortKernel
            request.getfixturevalue("several")
            chunks *= 8
        case = self.case(Sizes(), chunks)
        self.check(case)
        monkeypatch.setattr(owner, wait, lambda *arguments: None)
        assert race_is_reported(lambda: self.compiled(case)(*case.arguments))


def call(
    device_kind, dtype, *, page_size=128, width=128, sequences=2, pages_per_sequence=4, **options
):
    """Traces a call for a TPU that is not interpreted."""
    pages = jax.ShapeDtypeStruct((8, 1, page_size, width), dtype)
    eight_bits = jnp.dtype(dtype).itemsize == 1
    scales = jax.ShapeDtypeStruct((8, 1, page_size), jnp.float32) if eight_bits else None
    places = (sequences, pages_per_sequence), (2,), (2,)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in places]
    queries = jax.ShapeDtypeStruct((2, 4, width), jnp.bfloat16)

    def attend(queries, pages, scales, *where):
        return inspect.unwrap(paged_attention)(
            queries, pages, pages, *where, scale=1.0, k_scales=scales, v_scales=scales, **options
        )[0]

    with use_target(Target("mosaic_tpu", device_kind)):
        return jax.eval_shape(attend, queries, pages, scales, *integers)


def test_what_a_generation_cannot_read():
    golden.check_arguments(
        "pallas_kernels/tpu_cannot_read.txt", NotImplementedError, call, globals()
    )


def test_it_traces_for_a_tpu():
    assert call("TPU v5 lite", jnp.int8).shape == (2, 4, 128)
    assert call("TPU v6 lite", jnp.int8, int8_products=True).shape == (2, 4, 128)
