"""The Hopper kernel as it ships, replayed in NumPy: its results, and what it covers. All of a token
is in registers: there is nothing to order."""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels.rotate_and_write import mosaic_gpu_latents, norm_and_write
from tests.pallas_kernels.hopper_replay import mutated, replay
from tests.pallas_kernels.rotate_and_write.latents_suite import NormAndWriteSuite, check, make_case
from tests.pallas_kernels.rotate_and_write.test_mosaic_gpu import PLACES_CHECKED


class TestMosaicGpu(NormAndWriteSuite):
    def run(self, case, **options):
        function = functools.partial(norm_and_write, **case.options, **options)
        return replay(function, *case.arguments)


@pytest.mark.parametrize("old", PLACES_CHECKED)
def test_a_place_that_is_not_checked(old, monkeypatch):
    changed = mutated(mosaic_gpu_latents.place_of, (old, ""))
    monkeypatch.setattr(mosaic_gpu_latents, "place_of", changed)
    case = make_case("int8")
    with pytest.raises(AssertionError):
        check(case, TestMosaicGpu().run(case, stored=True), "int8")


@pytest.mark.parametrize(
    ("tokens", "q_latent", "latent", "rope", "cache", "dtype", "said"),
    [
        (96, 1536, 512, 64, jnp.uint8, jnp.bfloat16, ""),
        (1, 0, 512, 128, jnp.bfloat16, jnp.float16, ""),
        (8, 1536, 512, 64, jnp.float32, jnp.bfloat16, "a cache in float32"),
        (8, 1536, 512, 64, jnp.int8, jnp.float32, "latents in float32"),
        (8, 24, 512, 64, jnp.int8, jnp.bfloat16, "query_norm of 24"),
        (8, 0, 32, 64, jnp.int8, jnp.bfloat16, "latent_norm of 32"),
        (8, 0, 512, 8, jnp.int8, jnp.bfloat16, "keys of 8 columns"),
        (0, 0, 512, 64, jnp.int8, jnp.bfloat16, "no tokens"),
    ],
)
def test_what_the_kernel_covers(tokens, q_latent, latent, rope, cache, dtype, said):
    pages = (jnp.zeros((2, 1, 8, latent + rope), cache),)
    down = jnp.zeros((tokens, q_latent + latent + rope), dtype)
    query_norm = jnp.ones(q_latent, dtype) if q_latent else None
    gap = mosaic_gpu_latents.gap(pages, down, jnp.ones(latent, dtype), query_norm)
    assert gap.startswith(said)
    assert bool(gap) == bool(said)
