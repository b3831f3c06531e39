"""Results of a step in plain values, and the outputs that requests get from them.

The results' thread unpacks the arrays that `roles/sampling.py` packs (`step_result`). The
scheduler appends the tokens to their sequences; the engine and the planner's simulator read the
`StepOutputs`. Most tokens of a step belong to requests that simply go on: those are added in
arrays, and become `TokenOutput`s only when they are read.
"""

import logging
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from jaxserve.engine.lane_slots import LaneSlots
from jaxserve.engine.request import FinishReason, TokenLogprobs, TokenOutput
from jaxserve.engine.sequence import Sequence
from jaxserve.roles.layout import NO_TOKEN
from jaxserve.roles.step_arrays import REJECTED

if TYPE_CHECKING:
    from jaxserve.roles.step_plan import StepPlan


class StepResult(NamedTuple):
    """Results of a step, on the host. A row is `group * slots + slot`, as in the plan."""

    sampled: np.ndarray
    """int32 `[groups, slots]`, valid where the plan samples. After a step with drafts `[groups,
    slots, 1 + drafts]`: tokens, and `REJECTED` behind the accepted ones."""
    logprobs: dict[int, list[TokenLogprobs]]
    """Row → log-probabilities at the sampled tokens, where the plan asks for them."""
    scores: dict[int, list[TokenLogprobs]]
    """Row → log-probabilities of the plan's target tokens."""

    @property
    def counts(self) -> np.ndarray:
        """Number of tokens in every slot of a step with drafts, `[groups, slots]`."""
        return (self.sampled != REJECTED).sum(axis=-1, dtype=np.int32)


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


NOT_FINITE = (
    "the model's logits for the next token are not finite numbers, nor were they before its KV "
    "cache was computed anew on other pages"
)

logger = logging.getLogger(__name__)


class StepOutputs(Items[TokenOutput]):
    """Outputs of the requests that got a token they may keep, in the order of slots.

    Args:
      sequences: the requests' sequences.
      token_ids: one for each sequence; in a step with drafts a run of tokens for each.
      special: index → the output of a request that ended, or that asked for more than tokens.
      drafts: number of drafts of each sequence, in a step with drafts.
    """

    def __init__(
        self,
        sequences: Items[Sequence],
        token_ids: list[int] | list[list[int]],
        special: dict[int, TokenOutput],
        drafts: Items[int] = (),
    ):
        self._sequences, self._token_ids, self._special = sequences, token_ids, special
        self._drafts = drafts

    @property
    def ended(self) -> list[Sequence]:
        """Sequences that ended with this output."""
        special = self._special.items()
        return [self._sequences[at] for at, output in special if output.finish_reason is not None]

    @property
    def poisoned(self) -> list[Sequence]:
        """Sequences whose logits were not finite for the first time: computed anew."""
        special = self._special.items()
        some = [self._sequences[at] for at, output in special if output.finish_reason is None]
        return [sequence for sequence in some if sequence.suspect]

    @property
    def invalid(self) -> int:
        """Number of requests that ended because their logits were not finite."""
        return sum(output.error == NOT_FINITE for output in self._special.values())

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[TokenOutput]:
        special = self._special
        for index, sequence in enumerate(self._sequences):
            yield special[index] if index in special else self._plain(index, sequence)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def runs(self) -> Iterator[tuple[str, list[int] | None]]:
        """Yields each output's request id and tokens; None in place of the tokens if the output
        holds anything else. For readers of many outputs that need few as objects (`at`)."""
        for index, sequence in enumerate(self._sequences):
            run = None if index in self._special else self._run(index)
            yield sequence.request.request_id, run

    def at(self, index: int) -> TokenOutput:
        """Returns one output."""
        return self._special.get(index) or self._plain(index, self._sequences[index])

    def _run(self, index: int) -> list[int]:
        own = self._token_ids[index]
        return own if isinstance(own, list) else [own]

    def _plain(self, index: int, sequence: Sequence) -> TokenOutput:
        run = self._run(index)
        if not self._drafts:
            return _output(sequence, token_ids=run)
        return _output(sequence, token_ids=run, drafted=self._drafts[index], accepted=len(run) - 1)


def append_tokens(
    slots: LaneSlots,
    rows: np.ndarray,
    result: StepResult,
    end_ids: Collection[int],
    drafts: np.ndarray | None = None,
) -> StepOutputs:
    """Adds a sampled token, or a run of tokens, to the sequence in each row, which may end within
    it.

    Args:
      slots: the lane, which already counts the step as complete.
      rows: rows that got a token.
      result: results of the step.
      end_ids: every id that would end one of the lane's sequences.
      drafts: number of drafts in each row; None: the step had none.
    """
    groups, lane_slots, *drafted = result.sampled.shape
    token_ids = result.sampled.reshape(groups * lane_slots, *drafted)[rows]
    sequences = slots.sequences[rows].tolist()
    # `np.isin` would take a third of the time of this function.
    ends = np.equal.outer([NO_TOKEN, *end_ids], token_ids).any(axis=0)
    special = slots.options[rows] | slots.grammar[rows] | slots.is_last[rows]
    special |= ends.any(axis=1) if drafted else ends
    plain = ~special
    tokens: list[int] | list[list[int]]
    if drafted:
        for place in range(drafted[0]):
            some = plain & (token_ids[:, place] != REJECTED)
            slots.append(rows[some], token_ids[some, place])
        counts = (token_ids != REJECTED).sum(axis=1).tolist()
        runs = zip(token_ids.tolist(), counts, strict=True)
        tokens = [run[:count] for run, count in runs]
    else:
        slots.append(rows[plain], token_ids[plain])
        tokens = token_ids.tolist()
    outputs = {}
    for index in special.nonzero()[0].tolist():
        row, own = int(rows[index]), tokens[index]
        run = own if isinstance(own, list) else [own]
        outputs[index] = _append(slots, row, run, result.logprobs.get(row))
        if drafts is not None and drafts[index]:
            outputs[index] = msgspec.structs.replace(
                outputs[index], drafted=int(drafts[index]), accepted=len(run) - 1
            )
    return StepOutputs(sequences, tokens, outputs, () if drafts is None else drafts.tolist())


def _append(
    slots: LaneSlots, row: int, run: list[int], logprobs: list[TokenLogprobs] | None
) -> TokenOutput:
    """Adds a run of tokens to a sequence that may end within the run, or that has options."""
    kept: list[int] = []
    reported: list[TokenLogprobs] = []
    sequence: Sequence = slots.sequences[row]
    for place, token_id in enumerate(run):
        output = _append_one(slots, row, token_id, None if logprobs is None else logprobs[place])
        kept += output.token_ids
        reported += output.logprobs
        if output.finish_reason is not None or sequence.suspect:
            break
    slots.draftable[row] = sequence.draftable
    if len(run) == 1:
        return output
    return msgspec.structs.replace(output, token_ids=kept, logprobs=reported)


def _append_one(
    slots: LaneSlots, row: int, token_id: int, logprobs: TokenLogprobs | None
) -> TokenOutput:
    sequence = slots.write_back(row)
    request, grammar = sequence.request, sequence.request.params.grammar
    if token_id == NO_TOKEN:
        logger.error("request %s: its logits are not finite", request.request_id)
        sequence.suspect = True
        if sequence.poisoned is None:
            return TokenOutput(request_id=request.request_id)
        return _output(sequence, finish_reason="error", error=NOT_FINITE)
    ends = request.ends_at(token_id, sequence.generated)
    if ends or (grammar is not None and token_id in request.end_ids):
        return _output(sequence, finish_reason="stop", stop_token_id=token_id)
    slots.append(np.asarray([row]), np.asarray([token_id]))
    slots.write_back(row)
    finish_reason: FinishReason | None = None
    error = None
    if grammar is not None:
        try:
            grammar.accept(token_id)
            if grammar.finished:
                finish_reason = "stop"
            else:
                sequence.take_mask()
        except Exception as exception:
            logger.warning("request %s: its grammar failed: %s", request.request_id, exception)
            finish_reason, error = "error", f"the grammar failed: {exception}"
    if finish_reason is None and sequence.generated == sequence.max_generated:
        finish_reason = "length"
    return _output(
        sequence,
        token_ids=[token_id],
        finish_reason=finish_reason,
        error=error,
        logprobs=[] if logprobs is None else [logprobs],
    )


def _output(sequence: Sequence, **fields: Any) -> TokenOutput:
    """Returns a sequence's output, with unreported log-probabilities of its prompt."""
    scores, sequence.scores = sequence.scores, None
    return TokenOutput(
        request_id=sequence.request.request_id,
        prompt_logprobs=scores,
        cached_tokens=sequence.found or 0,
        queue_seconds=sequence.queue_seconds,
        hand_off_seconds=sequence.hand_off_seconds,
        **fields,
    )
