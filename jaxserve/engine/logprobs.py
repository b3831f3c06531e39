"""What a step gave, in plain values: tokens, and log-probabilities where requests want them.

Made by the results' thread out of the arrays that `programs/sampling.py` packs, read by the
scheduler.
"""

from typing import NamedTuple

import numpy as np

from jaxserve.pipeline.plan import StepPlan


class TokenLogprobs(NamedTuple):
    """A token with its log-probability, and the likeliest tokens with theirs, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


Place = tuple[int, int]
"""DP group and slot."""


class StepResult(NamedTuple):
    """What a step gave, on the host."""

    sampled: list[list[int]]
    """`[group][slot]`; read only where the plan samples."""
    logprobs: dict[Place, TokenLogprobs]
    """Of sampled tokens, where the plan asks for them."""
    scores: dict[Place, list[TokenLogprobs]]
    """Of the plan's targets."""


def step_result(
    plan: StepPlan, sampled: np.ndarray, logprobs: np.ndarray | None, scores: np.ndarray | None
) -> StepResult:
    """Unpacks a step's arrays.

    Args:
      sampled: `[groups, slots]`.
      logprobs: `[groups, slots, 1 + 2 * top]`, int32; floats as bits.
      scores: `[groups, tokens, 1 + 2 * top]`.
    """
    result = StepResult(sampled.tolist(), {}, {})
    if logprobs is None and scores is None:
        return result
    for group, rows in enumerate(plan.groups):
        start = 0
        for row in rows:
            place = group, row.slot
            if logprobs is not None and row.sample and row.logprobs is not None:
                token_id = result.sampled[group][row.slot]
                packed = logprobs[group, row.slot]
                result.logprobs[place] = _unpack(packed, token_id, row.logprobs)
            if scores is not None and row.targets:
                result.scores[place] = [
                    _unpack(packed, token_id, row.target_logprobs)
                    for packed, token_id in zip(scores[group, start:], row.targets, strict=False)
                ]
            start += len(row.token_ids)
    return result


def _unpack(packed: np.ndarray, token_id: int, top: int) -> TokenLogprobs:
    most = len(packed) // 2
    ids = packed[1 : 1 + min(top, most)].tolist()
    logs = packed.view(np.float32)
    best = logs[1 + most : 1 + most + len(ids)].tolist()
    return TokenLogprobs(token_id, float(logs[0]), tuple(zip(ids, best, strict=True)))
