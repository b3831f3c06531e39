import functools
from pathlib import Path

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.checkpoint.families import architecture
from jaxserve.config.load import load_deployment
from jaxserve.errors import ConfigError
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import layer_entries, page_arrays
from pallas_kernels.attention.api import paged_attention
from pallas_kernels.rotate_and_write import Latents, norm_and_write
from tests import golden
from tests.reference.tiny_sizes import TinyDeepseek, TinyIndexed, TinyQwen3
from tests.reference.tiny_step3 import TinyStep3


def first_arrays(config, deployment):
    """Arrays of the first layer."""
    return page_arrays(deployment, layer_entries(config, config.attentions()[0], deployment))


def test_every_dp_group_has_its_pages():
    overrides = {"attention.dp": 3, "attention.tp": 2, "cache.pages": 100, "cache.page_size": 4}
    deployment = load_deployment(Path(__file__).parent, {**overrides, "scheduler.max_length": 64})
    keys, values = first_arrays(architecture(TinyStep3().config()), deployment)
    # One head, and two devices that have a copy of it each.
    assert keys.shape == values.shape == (300, 2, 4, 32)
    assert keys.dtype == values.dtype == jnp.bfloat16


def arrays(config, overrides):
    """Shape and dtype of one layer's arrays: 2 pages of 4 tokens."""
    limits = {"cache.pages": 2, "cache.page_size": 4, "scheduler.max_length": 8}
    deployment = load_deployment(Path(__file__).parent, limits | overrides)
    return [(array.shape, array.dtype.name) for array in first_arrays(config, deployment)]


def test_latents_behind_an_indexer_have_whole_rows_on_tpus():
    """512 + 64 columns of DeepSeek-V3.2, and an index key of 128."""
    sizes = TinyIndexed(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    config = architecture(sizes.config())
    for platform, width in (("tpu", 640), ("gpu", 576), ("cpu", 576)):
        found = arrays(msgspec.structs.replace(config, platform=platform), {})
        assert [shape[-1] for shape, _ in found] == [width, 128]


LATENT = architecture(TinyDeepseek(kv_lora_rank=32, qk_rope_head_dim=8).config())
GROUPED = architecture(TinyQwen3(num_key_value_heads=2, head_dim=16).config())


@golden.table("model/cache_formats.yaml")
def test_formats(cache, dtype, kind):
    """Arrays of 8 bits have a scale a token and head."""
    overrides = {"cache.format": cache, "dtype": dtype}
    eight_bits = cache in ("fp8", "int8")
    scales = [((2, 2, 4), "float32")] * 2 * eight_bits
    assert arrays(GROUPED, overrides) == [((2, 2, 4, 16), kind)] * 2 + scales
    scales = [((2, 1, 4), "float32")] * eight_bits
    assert arrays(LATENT, overrides) == [((2, 1, 4, 40), kind), *scales]


# At tp 4 two devices have the same head.
@pytest.mark.parametrize(("tp", "heads", "latents"), [(1, 2, 1), (2, 2, 2), (4, 4, 4)])
def test_heads_of_all_devices(tp, heads, latents):
    overrides = {"attention.tp": tp}
    assert [shape[1] for shape, _ in arrays(GROUPED, overrides)] == [heads] * 2
    assert [shape[1] for shape, _ in arrays(LATENT, overrides)] == [latents]


BATCH = RaggedBatch(
    jnp.asarray([0, 0, 1, 1], jnp.int32),
    jnp.asarray([0, 1, 0, -1], jnp.int32),
    jnp.asarray([[1], [0]], jnp.int32),
    jnp.zeros(4, jnp.int32),
)
"""Two tokens on page 1, one on page 0, and padding."""


def random_rows(seed, heads, width, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    # Magnitudes that differ from token to token, as only a scale a row can hold.
    rows = rng.normal(size=(4, heads, width)) * 10.0 ** np.arange(-2, 2)[:, None, None]
    return jnp.asarray(rows, dtype)


def empty(config, cache, dtype="float32", rope="auto"):
    shapes = arrays(config, {"cache.format": cache, "cache.rope": rope, "dtype": dtype})
    return tuple(jnp.zeros(shape, kind) for shape, kind in shapes)


def write(pages, row, batch, epsilon=1.0) -> Latents:
    """Keys that are not turned, and norms that leave small latents smaller than large ones."""
    turn = jnp.ones((len(row), 4)), jnp.zeros((len(row), 4))
    norm = {"latent_norm": jnp.ones(32, row.dtype), "epsilon": epsilon}
    return norm_and_write(pages, row[:, 0], *turn, *batch.where, **norm, stored=True)


def normed(row, epsilon=1.0):
    """Rows that `write` writes, before rounding."""
    row = np.array(row, np.float32)
    mean = np.mean(row[..., :32] ** 2, axis=-1, keepdims=True)
    row[..., :32] /= np.sqrt(mean + epsilon)
    return row


class TestWrite:
    """Reading returns the same rows as writing did, and these are close to the rows written."""

    @pytest.mark.parametrize(
        ("cache", "error"),
        [("auto", 0), ("bfloat16", 2**-8), ("fp8", 2**-4), ("int8", 0.504 / 127)],
    )
    def test_latents(self, cache, error):
        row = random_rows(0, 1, 40)
        _, back, pages = write(empty(LATENT, cache), row, BATCH)
        assert back.dtype == row.dtype
        row = normed(row)
        largest = np.abs(row).max(axis=-1, keepdims=True)
        back = np.asarray(back)[:, None]
        assert np.all(np.abs(back - row) <= (error + 1e-6) * largest)
        # A token that sees itself alone reads its own latent.
        alone = BATCH._replace(position=jnp.asarray([0, -1, 0, -1], jnp.int32))
        scales = pages[1] if len(pages) > 1 else None
        pair = functools.partial(paged_attention, jnp.asarray(row), pages[0], None, *alone.where)
        read, lse = pair(scale=1.0, v_width=32, k_scales=scales, with_lse=True)
        for token in (0, 2):
            np.testing.assert_allclose(np.asarray(read)[token, 0], back[token, 0, :32], rtol=1e-6)
            score = row.astype(np.float64)[token, 0] @ back[token, 0]
            assert np.asarray(lse)[token, 0] == pytest.approx(score, rel=1e-4, abs=1e-5)
        assert np.isneginf(np.asarray(lse)[3]).all()

    @pytest.mark.parametrize(
        ("cache", "row", "kept", "scale"),
        [
            # Of the largest magnitude 1.27 every value is a multiple of 0.01.
            ("int8", [1.27, -0.5, 0.004], [127, -50, 0], 0.01),
            # The largest magnitude becomes 448, bits 0x7E; a quarter of it 112, bits 0x6E.
            ("fp8", [-4.0, 1.0, 0.0], [0xFE, 0x6E, 0], 4 / 448),
        ],
    )
    def test_literal(self, cache, row, kept, scale):
        one = 1 - np.square(row).sum() / 32  # with the mean square
        row = jnp.zeros((4, 1, 40)).at[0, 0, :3].set(jnp.asarray(row))
        values, scales = write(empty(LATENT, cache), row, BATCH, one).pages
        assert np.asarray(values)[1, 0, 0, :3].tolist() == kept
        assert np.asarray(scales)[1, 0, 0] == pytest.approx(scale)

    def test_a_bfloat16_model_reads_bfloat16(self):
        row = random_rows(4, 1, 40, jnp.bfloat16)
        for cache in ("auto", "fp8", "int8"):
            back = write(empty(LATENT, cache, "bfloat16"), row, BATCH).row
            assert back.dtype == jnp.bfloat16
        exact = write(empty(LATENT, "auto", "bfloat16"), row, BATCH).row
        np.testing.assert_allclose(
            np.asarray(exact, np.float32), normed(row)[:, 0], rtol=2**-7, atol=1e-6
        )


SPLIT = {"cache.format": "int8", "cache.rope": "bfloat16"}


def test_the_rotated_part_of_latents_has_an_array_of_its_own():
    expected = [((2, 1, 4, 32), "int8"), ((2, 1, 4, 8), "bfloat16"), ((2, 1, 4), "float32")]
    assert arrays(LATENT, SPLIT) == expected
    assert arrays(LATENT, SPLIT | {"cache.format": "fp8"})[0] == ((2, 1, 4, 32), "uint8")
    with pytest.raises(ConfigError, match=r"cache\.rope = bfloat16.*the model has none"):
        arrays(GROUPED, SPLIT)
    with pytest.raises(ConfigError, match=r"cache\.rope.*cache\.format = auto is bfloat16"):
        arrays(LATENT, {"cache.rope": "bfloat16"})


def test_rotated_parts_in_bf16_leave_the_latents_fine_steps():
    """Under one scale the latent's steps would be those of an outlier in the rotated part."""
    row = np.random.default_rng(0).normal(size=(4, 1, 40)).astype(np.float32)
    row[..., 32:] *= 30
    errors = []
    for rope in ("auto", "bfloat16"):
        found = write(empty(LATENT, "int8", rope=rope), jnp.asarray(row), BATCH).row
        errors.append(np.sqrt(np.mean((np.asarray(found) - normed(row)[:, 0])[:, :32] ** 2)))
    assert 15 < errors[0] / errors[1] < 60
