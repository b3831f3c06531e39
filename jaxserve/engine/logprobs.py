"""What a step gave, in plain values: tokens, and log-probabilities where requests want them.

Made by the results' thread out of the arrays that `roles/sampling_programs.py` packs, read by the
scheduler.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxserve.roles.layout import REJECTED

if TYPE_CHECKING:
    from jaxserve.roles.step_plan import StepPlan


class TokenLogprobs(NamedTuple):
    """A token with its log-probability, and the likeliest tokens with theirs, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class StepResult(NamedTuple):
    """What a step gave, on the host. A row is `group * slots + slot`, as in the plan."""

    sampled: np.ndarray
    """int32 `[groups, slots]`; read only where the plan samples. Of a step with drafts `[groups,
    slots, 1 + drafts]`: tokens, and `REJECTED` behind them."""
    logprobs: dict[int, list[TokenLogprobs]]
    """By row: log-probabilities at the sampled tokens, where the plan asks for them."""
    scores: dict[int, list[TokenLogprobs]]
    """By row: log-probabilities of the plan's target tokens."""

    @property
    def counts(self) -> np.ndarray:
        """Tokens of every slot, `[groups, slots]`, of a step with drafts."""
        counts: np.ndarray = (self.sampled != REJECTED).sum(axis=-1, dtype=np.int32)
        return counts


def step_result(
    plan: "StepPlan", sampled: np.ndarray, logprobs: np.ndarray | None, scores: np.ndarray | None
) -> StepResult:
    """Unpacks a step's arrays.

    Args:
      sampled: `[groups, slots]`, or as `StepResult` says of a step with drafts.
      logprobs: `[groups, slots, 1 + 2 * top]`, of a step with drafts `[groups, slots, 1 + drafts,
        1 + 2 * top]`, int32; floats as bits.
      scores: `[groups, tokens, 1 + 2 * top]`.
    """
    result = StepResult(sampled, {}, {})
    if logprobs is None and scores is None:
        return result
    slots = sampled.shape[1]
    starts = plan.token_starts(slots)
    for options in plan.options:
        row = options.row
        at = divmod(row, slots)
        if logprobs is not None and options.logprobs is not None:
            run = sampled[at].reshape(-1)
            packed = logprobs[at].reshape(len(run), -1)
            result.logprobs[row] = [
                _unpack(one, token_id, options.logprobs)
                for one, token_id in zip(packed, run.tolist(), strict=True)
                if token_id != REJECTED
            ]
        if scores is not None and options.targets:
            group, start = starts[row]
            result.scores[row] = [
                _unpack(one, token_id, options.target_logprobs)
                for one, token_id in zip(scores[group, start:], options.targets, strict=False)
            ]
    return result


def _unpack(packed: np.ndarray, token_id: int, top: int) -> TokenLogprobs:
    most = len(packed) // 2
    ids = packed[1 : 1 + min(top, most)].tolist()
    logs = packed.view(np.float32)
    best = logs[1 + most : 1 + most + len(ids)].tolist()
    return TokenLogprobs(token_id, float(logs[0]), tuple(zip(ids, best, strict=True)))
