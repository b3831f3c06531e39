"""Tests of every backend of `norm_and_write`, against NumPy; subclasses say which one.

Tokens, pages and places are those of `suite.py`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.rotate_and_write import norm_and_write
from tests import golden
from tests.pallas_kernels.norm_quantize.suite import norm_numpy
from tests.pallas_kernels.quantize.definition import LARGEST
from tests.pallas_kernels.rotate_and_write import suite

LATENT, ROPE = 128, 64


class Case(NamedTuple):
    """A call, and what it should give."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    query: np.ndarray
    row: np.ndarray
    pages: tuple[np.ndarray, ...]


def make_case(cache, *, q_latent=256, interleaved=True, split=False, dtype=jnp.bfloat16):
    """Eight tokens, whose keys are larger than their latents."""
    rng, tokens = np.random.default_rng(q_latent + split), len(suite.SEQUENCES)

    def random(*shape):
        return rng.normal(size=shape).astype(dtype)

    places, widths = (suite.POOL, 1, suite.PAGE_SIZE), [LATENT, ROPE] if split else [LATENT + ROPE]
    pages = [random(*places, width) for width in widths]
    if cache in LARGEST:
        kept = np.uint8 if cache == "fp8" else np.int8
        pages[0] = rng.integers(0, 99, pages[0].shape).astype(kept)
        pages.append(rng.normal(size=places).astype(np.float32))
    down = random(tokens, q_latent + LATENT + ROPE)
    down[:, -ROPE:] *= 8
    norms = {"latent_norm": random(LATENT)} | ({"query_norm": random(q_latent)} if q_latent else {})
    angles = rng.normal(size=(tokens, ROPE // 2)) * 9
    key = down[:, -ROPE:]
    pairs = (key[:, ::2], key[:, 1::2]) if interleaved else np.split(key, 2, axis=-1)
    key = suite.turned(*pairs, angles, dtype)
    latent = norm_numpy(down[:, q_latent:-ROPE], norms["latent_norm"], 1e-6)
    query = down[:, :q_latent]
    query = norm_numpy(query, norms["query_norm"], 1e-6) if q_latent else query
    turn = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    where = map(jnp.asarray, (suite.TABLE, suite.SEQUENCES, suite.POSITIONS))
    arguments = (tuple(map(jnp.asarray, pages)), jnp.asarray(down), *turn, *where)
    options = {name: jnp.asarray(norm) for name, norm in norms.items()}
    options |= {"epsilon": 1e-6, "interleaved": interleaved}
    row = np.concatenate([latent, key], axis=-1).astype(np.float32)
    return Case(arguments, options, query, row, tuple(pages))


def check(case, found, cache):
    """Nothing else is written; what is, stands for the rows."""
    query = np.asarray(found.query, np.float32)
    np.testing.assert_allclose(query, case.query.astype(np.float32), rtol=2**-6, atol=2e-2)
    written = [np.array(array) for array in found.pages]
    split = len(written) == 3
    for token, (page, row) in suite.PLACES.items():
        kept = written[0][page, 0, row]
        if cache in LARGEST:
            own = case.row[token, : len(kept)]
            kept = suite.meant(kept, written[-1][page, 0, row], own, cache)
            written[-1][page, 0, row] = case.pages[-1][page, 0, row]
        if split:
            assert written[1].dtype == ml_dtypes.bfloat16
            kept = np.concatenate([kept, written[1][page, 0, row].astype(np.float32)])
            written[1][page, 0, row] = case.pages[1][page, 0, row]
        step = np.abs(case.row[token]).max() / 127 if cache == "int8" else 3e-2
        kept = kept.astype(np.float32)
        np.testing.assert_allclose(kept, case.row[token], rtol=suite.near(cache), atol=step)
        if found.row is not None:
            np.testing.assert_allclose(np.asarray(found.row[token], np.float32), kept, rtol=2**-8)
        written[0][page, 0, row] = case.pages[0][page, 0, row]
    for array, before in zip(written, case.pages, strict=True):
        np.testing.assert_array_equal(array, before)


class NormAndWriteSuite(suite.Suite):
    """Eight tokens of few columns, since interpreting is slow."""

    operation = staticmethod(norm_and_write)

    @golden.table("pallas_kernels/latents_written.yaml")
    def test_against_numpy(self, cache, sizes, stored):
        case = make_case(cache, **sizes)
        found = self.run(case, stored=stored)
        assert (found.row is not None) == stored
        check(case, found, cache)
