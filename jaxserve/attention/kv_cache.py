"""The paged KV cache of one layer: where it lies and how large it is.

K and V have an array each, `[dp * pages, page_size, kv_heads, head_dim]`: every DP group owns its
`pages` rows, and page ids in a page table count within the group. `pallas_kernels/attention`
defines how tokens lie inside a page; `engine/pages.py` decides who owns which.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig

PAGES_SPEC = PartitionSpec("dp")


def page_shape(config: ModelConfig, deployment: Deployment) -> tuple[int, int, int, int]:
    """Global shape of the K (or V) pages of one layer."""
    pages = deployment.attention.dp * deployment.cache.pages
    return (pages, deployment.cache.page_size, config.kv_heads, config.head_dim)


def zeros(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.NamedSharding
) -> jax.Array:
    """A zeroed array, made on its devices."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
