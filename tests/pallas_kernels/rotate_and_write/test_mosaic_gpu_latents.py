"""The Hopper kernel as it ships, replayed in NumPy: its results, and what it covers. All of a token
is in registers: there is nothing to order."""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels.rotate_and_write import mosaic_gpu_latents, norm_and_write
from tests import golden
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


def test_what_the_kernel_covers():
    def call(tokens, q_latent, latent, rope, cache, dtype):
        pages = (jnp.zeros((2, 1, 8, latent + rope), cache),)
        down = jnp.zeros((tokens, q_latent + latent + rope), dtype)
        query_norm = jnp.ones(q_latent, dtype) if q_latent else None
        return mosaic_gpu_latents.gap(pages, down, jnp.ones(latent, dtype), query_norm)

    golden.check_values("pallas_kernels/hopper_latents_gaps.txt", call, globals())
