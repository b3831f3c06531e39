"""Tells which number formats this process computes; both ends of a link say so in their hellos.

Called where runtimes introduce themselves: `role_runtime.py` and `pages_link.py`.
"""

import functools
import logging
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config.formats import FormatName, choices
from jaxserve.model.message import decode_rows, encode_rows
from pallas_kernels.coverage import collect_fallbacks

logger = logging.getLogger(__name__)

_UNABLE = (AttributeError, NotImplementedError, TypeError, ValueError, jax.errors.JaxRuntimeError)


@functools.cache
def computed_formats() -> list[str]:
    """Returns the formats of rows that this process's devices encode and decode with its JAX.

    Each is tried: a table of platforms and versions would be another place to keep up to date.
    """
    return [name for name in choices("dispatch") if _computes(cast(FormatName, name))]


def versioned(role: str) -> str:
    """Returns a worker's name with its version of JAX and its platform."""
    return f"{role} with JAX {jax.__version__} on {jax.default_backend()}"


def _computes(name: FormatName) -> bool:
    rows = np.linspace(-3.0, 3.0, 256, dtype=np.float32).reshape(2, 128)

    def there_and_back(rows: jax.Array) -> jax.Array:
        return decode_rows(*encode_rows(rows, name), jnp.dtype(jnp.float32))

    try:
        with collect_fallbacks():  # of sizes that no message has
            found = np.asarray(jax.jit(there_and_back)(rows))
    except _UNABLE as error:
        logger.warning("%s is not computed here: %s", name, error)
        return False
    # FP8 (e4m3) has three bits behind the leading one, the smallest values apart.
    return bool(np.abs(found - rows).max() <= 3.0 / 16)
