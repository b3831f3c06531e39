"""What changes a request's logits: packed once a request, and sent with each of its steps.

Called by `sequence.py`. The device applies it (`sampler.adjust`).
"""

from collections.abc import Mapping

import numpy as np

from jaxserve.engine.request import Request
from jaxserve.roles.step_plan import SlotRules

BANNED = -1e30
"""Added to the logit of a token that may not come yet. Finite, so that it still comes where a
grammar allows nothing else."""


class RequestRules:
    """The rules of one request."""

    def __init__(self, request: Request):
        params = request.params
        self._params = params
        banned = dict.fromkeys(sorted(request.end_ids), BANNED)
        self._packed = _pack(params.logit_bias)
        self._packed_with_banned = _pack({**params.logit_bias, **banned})
        self._prompt = b""
        if params.repetition_penalty != 1.0:
            self._prompt = bitmask(request.prompt)
        self._counts_from = len(request.prompt) if params.penalises else None

    def of_step(
        self, *, generated: int, fresh: bool, samples: bool, allowed: bytes
    ) -> SlotRules | None:
        """The rules of the next step; None if it has none.

        Args:
          generated: tokens before the one that the step samples.
          fresh: whether this is the first step since the sequence got its slot.
          samples: whether the step samples.
          allowed: bitmask of the tokens that may come; empty: all.
        """
        bias_ids, biases = b"", b""
        if samples:
            banned = generated < self._params.min_tokens
            bias_ids, biases = self._packed_with_banned if banned else self._packed
        else:
            allowed = b""
        if self._counts_from is None and not bias_ids and not allowed:
            return None
        fresh = fresh and self._counts_from is not None
        return SlotRules(
            repetition_penalty=self._params.repetition_penalty,
            presence_penalty=self._params.presence_penalty,
            frequency_penalty=self._params.frequency_penalty,
            counts_from=self._counts_from,
            fresh=fresh,
            prompt=self._prompt if fresh else b"",
            bias_ids=bias_ids,
            biases=biases,
            allowed=allowed,
        )


def bitmask(token_ids: list[int]) -> bytes:
    """A bitmask of token ids, with as many words as the largest id needs."""
    bits = np.zeros(-(-(max(token_ids) + 1) // 32) * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _pack(biases: Mapping[int, float]) -> tuple[bytes, bytes]:
    ids = np.asarray(list(biases), "<i4")
    return ids.tobytes(), np.asarray(list(biases.values()), "<f4").tobytes()
