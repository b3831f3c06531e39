"""Starts an engine and runs a first token, so that weights with NaN or Inf are refused by name.

Called by the openers of engines before they take requests. One token passes every layer, but only
the experts that it is routed to.
"""

import queue

import jax
import jax.numpy as jnp

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import TokenOutput
from jaxserve.engine.stepper import PREFILL_PARAMS
from jaxserve.errors import CheckpointError, EngineFailedError
from jaxserve.roles.weights import HeldBlock


def start_checked(engine: Engine) -> None:
    """Starts an engine; closes it again if its first token is none.

    Raises:
      CheckpointError: The logits are not finite. Names the blocks of this process that are not.
      EngineFailedError: The engine failed, or gave no token in time.
    """
    engine.start()
    news: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()
    engine.submit([0], PREFILL_PARAMS, news.put)
    try:
        output = news.get(timeout=2 * engine.deployment.cluster.step_seconds)
    except queue.Empty:
        raise EngineFailedError("the first token did not come in time") from None
    if output.engine_failed:
        raise EngineFailedError(output.error or "the engine failed at its first token")
    if output.error is not None:
        found = ", ".join(block.name for block in engine.driver.held() if not _is_finite(block))
        engine.close()
        raise CheckpointError(
            f"{engine.deployment.model}: logits are not finite, nor are {found or 'other parts'}"
        )


def _is_finite(block: HeldBlock) -> bool:
    floats = [leaf for leaf in block.leaves() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if block.entry is not None:
        floats = [leaf[block.entry] for leaf in floats]
    return all(_all_finite(shard.data) for leaf in floats for shard in leaf.addressable_shards)


@jax.jit
def _all_finite(part: jax.Array) -> jax.Array:
    return jnp.isfinite(part.astype(jnp.float32)).all()
