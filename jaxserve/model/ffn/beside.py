"""Work that a device does for its own rows while other rows travel: the unsplit shared expert.

Called by `exchange.py` and `collectives.py`, inside their `shard_map`. XLA would put all work that
nothing waits for beside the last collective; here each collective has one step beside it. Knows
nothing of meshes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from jaxserve.model.ffn.dense import DenseFFN
from jaxserve.model.message import DispatchMessage

Step = Callable[[Any], Any]


class Beside:
    """Chain of steps, each of which takes the result of the one before it.

    Args:
      value: input of the first step: a tree of arrays, as between all steps.
    """

    def __init__(self, value: Any, steps: Sequence[Step]):
        self._value, self._steps = value, list(steps)

    def during(
        self,
        moving: Array,
        collective: Callable[[Array], Array],
        *,
        last: bool = False,
        spared: int = 0,
    ) -> Array:
        """Returns the collective's result. The next step, if one is left, runs while the collective
        moves its rows; neither begins before both can.

        Args:
          last: True runs all remaining steps, because no other collective follows.
          spared: number of steps to leave for later collectives, which take longer.
        """
        left = len(self._steps)
        steps = left if last else min(1, max(0, left - spared))
        if not steps:
            return collective(moving)
        moving, self._value = jax.lax.optimization_barrier((moving, self._value))
        arrived = collective(moving)
        self._run(steps)
        arrived, self._value = jax.lax.optimization_barrier((arrived, self._value))
        return arrived

    def result(self) -> Any:
        """Returns the last step's result, after running the steps left over from collectives."""
        self._run(len(self._steps))
        return self._value

    def _run(self, steps: int) -> None:
        for step in self._steps[:steps]:
            self._value = step(self._value)
        del self._steps[:steps]


NOTHING = Beside(None, ())
"""No work: collectives run alone."""


def shared_expert(
    expert: DenseFFN, packed: Array, unpack: Callable[[Array], DispatchMessage]
) -> Beside:
    """The steps of the whole shared expert for packed rows, which the first one unpacks."""
    like = unpack(packed)
    first, *others = expert.steps(like.tokens, like.wide)

    def unpack_first(packed: Array) -> Any:
        own = unpack(packed)
        return first((own.tokens, own.encoded, own.wide))

    return Beside(packed, [unpack_first, *others])
