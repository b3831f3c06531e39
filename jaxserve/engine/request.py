"""A request, its checks, and the outputs that it gets, token by token.

Called by the server and `LLM` (which build `SamplingParams`), by the engine (which makes and checks
a `Request`), by routers (which check before they send) and by the scheduler (which answers with
`TokenOutput`). Knows nothing of text, tokenizers or devices.
"""

import math
import operator
import random
import time
from collections.abc import Sequence, Sized
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.link.pages.source import PagesSource
from jaxserve.roles.layout import MAX_BIASES, MAX_LOGPROBS, pages_for

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_BANNED_IDS = MAX_BIASES - MAX_LOGIT_BIAS
MAX_PRIORITY = 100
MAX_CACHE_SALT_CHARACTERS = 256
MAX_INT32 = 2**31 - 1
MAX_UINT32 = 2**32 - 1
MIN_FLOAT32 = 2.0**-126
"""The smallest float32 that devices do not take for 0."""


class TokenLogprobs(NamedTuple):
    """A token with its log-probability, and the likeliest tokens with theirs, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Grammar(Protocol):
    """State that decides which tokens may come next in one request; never shared by two.

    Called on the engine's thread, so it must be quick. An exception ends the request alone.
    """

    @property
    def finished(self) -> bool:
        """True if the text is complete and nothing may follow."""

    def mask(self) -> np.ndarray:
        """Returns the allowed tokens: uint32 `[ceil(vocab / 32)]`, bit t % 32 of word t // 32."""

    def accept(self, token_id: int) -> None:
        """Advances by the next token."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules that choose the tokens of one request and end it.

    Attributes:
      max_tokens: the most tokens to generate, at least 1.
      temperature: in [0, 2]; 0 takes the most probable token (greedy).
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: in (0, 1]; keep the smallest set of tokens whose probabilities reach it.
      min_p: in [0, 1]; drop tokens less probable than min_p times the most probable one.
      seed: uint32; the same seed gives the same tokens whatever else is in the batch. None: any.
      stop: strings that end the text; found by the tokenizer's side, not by the scheduler.
      stop_token_ids: token ids that end the request, besides the model's own end ids.
      ignore_eos: the model's end ids are tokens like any other. `stop_token_ids` still count.
      min_tokens: ids that would end the request come only after this many tokens.
      presence_penalty: in [-2, 2]; taken off the logits of tokens that were generated.
      frequency_penalty: in [-2, 2]; the same, as often as a token was generated.
      repetition_penalty: in (0, 10]; divides positive logits of tokens in prompt or output,
        multiplies negative ones. 1: off.
      logit_bias: token id → number added to its logit, in [-100, 100]; at most 300 entries.
      logprobs: report each token's log-probability, and those of the 0 to 20 likeliest tokens,
        before temperature, penalties, biases and masks. None: report nothing.
      prompt_logprobs: the same for the prompt's tokens, which are then all computed.
      logprob_token_ids: tokens reported in place of the likeliest; `logprobs` is their number.
      skip_special_tokens: special tokens have no text; False spells them out. The tokenizer's
        business, like `stop`.
      include_stop: the text ends with the stop string rather than before it; also the tokenizer's.
      grammar: decides which tokens may come; an object of the request's own. None: all.
      priority: in [-100, 100]; lower ones are served earlier, see `scheduler.py`.
      cache_salt: requests share cached prompts only with those of equal salt: a tenant's name.
      speculative: whether its tokens may be drafted, where the deployment does that. It changes no
        token.
      trace: W3C `traceparent` of the span that the request belongs to; empty: it is not traced.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop: bool = False
    grammar: Any = None
    """A `Grammar` or None."""
    priority: int = 0
    cache_salt: str = ""
    speculative: bool = True
    trace: str = ""

    def __post_init__(self) -> None:
        """Accepts one string, or a list, in place of a tuple."""
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for field in ("stop", "stop_token_ids", "logprob_token_ids"):
            value = getattr(self, field)
            if isinstance(value, list):
                msgspec.structs.force_setattr(self, field, tuple(value))

    def validate(self) -> None:
        """Raises InvalidRequestError naming the first wrong field, its value and its range."""
        _check_integer("max_tokens", self.max_tokens, 1, MAX_INT32)
        _check_number("temperature", self.temperature, 0.0, 2.0, "[0, 2] (0 is greedy)")
        _check_integer("top_k", self.top_k, 0, MAX_INT32, note=" (0 keeps all tokens)")
        _check_number("top_p", self.top_p, 0.0, 1.0, "(0, 1]", above_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0, "[0, 1]")
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_UINT32)
        _check_size("stop", self.stop, tuple, "a list", MAX_STOP_STRINGS)
        for index, string in enumerate(self.stop):
            _check_stop_string(f"stop[{index}]", string)
        limits = {"stop_token_ids": MAX_STOP_TOKEN_IDS, "logprob_token_ids": MAX_LOGPROBS}
        for field, entries in limits.items():
            ids = _check_size(field, getattr(self, field), tuple, "a list", entries)
            for index, token_id in enumerate(ids):
                _check_integer(f"{field}[{index}]", token_id, 0, MAX_INT32)
        for field in ("ignore_eos", "skip_special_tokens", "include_stop", "speculative"):
            if not isinstance(value := getattr(self, field), bool):
                raise InvalidRequestError(field, f"{value!r} is not a bool")
        _check_integer("min_tokens", self.min_tokens, 0, self.max_tokens, note=" (max_tokens)")
        for field in ("presence_penalty", "frequency_penalty"):
            _check_number(field, getattr(self, field), -2.0, 2.0, "[-2, 2]")
        penalty = self.repetition_penalty
        _check_number("repetition_penalty", penalty, 0.0, 10.0, "(0, 10]", above_low=True)
        _check_logit_bias(self.logit_bias)
        for field in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, field)) is not None:
                _check_integer(field, value, 0, MAX_LOGPROBS)
        _check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        most = MAX_CACHE_SALT_CHARACTERS
        _check_size("cache_salt", self.cache_salt, str, "a string", most, "characters")
        for name in ("mask", "accept", "finished") if self.grammar is not None else ():
            if not hasattr(self.grammar, name):
                raise InvalidRequestError("grammar", f"{self.grammar!r} has no {name!r}")

    @property
    def penalises(self) -> bool:
        """True if earlier tokens change the logits."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt on its way through the engine. It never changes; its `Sequence` does.

    Attributes:
      request_id: unique among the requests that have not ended.
      prompt: token ids.
      params: validated sampling parameters.
      eos_token_ids: the model's end ids.
      seed: uint32, resolved: `params.seed` or a drawn one.
      arrival: seconds of `time.monotonic` at which it was submitted.
      deadline: seconds at which it is given up; None: never.
      emitted: tokens that another worker generated before the request came here.
      source: where a prefill worker holds its first tokens' KV entries; None: nowhere.
      hold: whether its pages are held in the prefix cache once its prompt is computed.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    emitted: list[int] = []
    source: PagesSource | None = None
    hold: bool = False

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end the request."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos else own | self.eos_token_ids

    def ends_at(self, token_id: int, generated: int) -> bool:
        """Returns whether `token_id`, after `generated` earlier tokens, ends the request."""
        return generated >= self.params.min_tokens and token_id in self.end_ids


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of one request: new tokens, the end of the request, or both.

    Attributes:
      request_id: the request.
      token_ids: the new tokens, in order; never the id that ended the request.
      finish_reason: set in the last output of a request, which comes exactly once.
      stop_token_id: the eos or stop id that ended the request, where one did.
      error: the reason in words, where `finish_reason` is "error".
      logprobs: one for each of `token_ids`, where the request asked for them.
      prompt_logprobs: one for each of the prompt's tokens but the first; in the output with the
        request's first token or end, where it asked for them.
      cached_tokens: tokens of the prompt that were found in the prefix cache; the same in every
        output.
      queue_seconds: how long it waited until it was let in.
      hand_off_seconds: how long it then waited for its KV pages from a prefill worker.
      drafted: drafts of the request that the step verified.
      accepted: right drafts, including those behind the request's end.
      pages_lost: for an error: KV entries that a prefill worker held did not arrive, and were not
        computed here; another worker may run the request.
      engine_failed: for an error: the engine that had the request has failed; another may go on
        with it.
      unavailable: for an error: no worker could run the request; one may be back later.
      offset: tokens that the request had before these, from a worker to its router; None inside a
        process.
    """

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    hand_off_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    pages_lost: bool = False
    engine_failed: bool = False
    unavailable: bool = False
    offset: int | None = None

    @property
    def says_nothing(self) -> bool:
        """True if the output has no token: its request only continues, computed anew."""
        nothing = self.finish_reason is None and not self.token_ids
        return nothing and self.prompt_logprobs is None


def _check_integer(field: str, value: object, low: int, high: int, note: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(field, f"{value!r} is not an integer")
    if not low <= value <= high:
        raise InvalidRequestError(field, f"{value} is not in [{low}, {high}]{note}")


def _check_number(
    field: str, value: object, low: float, high: float, interval: str, above_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(field, f"{value!r} is not a number")
    inside = low <= value <= high and not (above_low and value == low)
    if math.isnan(value) or not inside:
        raise InvalidRequestError(field, f"{value} is not in {interval}")
    if above_low and value < MIN_FLOAT32:
        raise InvalidRequestError(field, f"{value} is below {MIN_FLOAT32:.4g}, 0 in float32")


def _check_size[S: Sized](
    field: str, value: object, kind: type[S], name: str, most: int, unit: str = "entries"
) -> S:
    if not isinstance(value, kind):
        raise InvalidRequestError(field, f"{value!r} is not {name}")
    if len(value) > most:
        raise InvalidRequestError(field, f"{len(value)} {unit}, at most {most} are allowed")
    return value


def _check_stop_string(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"{value!r} is not a string")
    if not 1 <= len(value) <= MAX_STOP_STRING_CHARACTERS:
        raise InvalidRequestError(
            field, f"{len(value)} characters, not in [1, {MAX_STOP_STRING_CHARACTERS}]"
        )


def _check_logit_bias(biases: object) -> None:
    biases = _check_size("logit_bias", biases, dict, "a mapping", MAX_LOGIT_BIAS)
    for token_id, bias in biases.items():
        _check_integer("logit_bias", token_id, 0, MAX_INT32, note=" (a token id)")
        _check_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, "[-100, 100]")


PATIENCE = 10.0
"""Seconds after arrival at which priority 0 is due; each step of priority adds as many."""


def due(request: Request) -> float:
    """Returns when a request should be served, in seconds of its arrival's clock."""
    patient = request.arrival + PATIENCE * (1 + request.params.priority)
    return patient if request.deadline is None else min(patient, request.deadline)


class RequestLimits:
    """The limits that a request must keep.

    Args:
      max_length: longest sequence, prompt and output together, in tokens.
      pages: pages a DP group.
      page_size: tokens a page.
    """

    def __init__(self, *, max_length: int, pages: int, page_size: int):
        self._max_length, self._pages, self._page_size = max_length, pages, page_size

    def max_generated(self, request: Request) -> int:
        """Generated tokens at which the request ends: max_tokens, or what max_length leaves."""
        return min(request.params.max_tokens, self._max_length - len(request.prompt))

    def check(self, request: Request) -> None:
        """Raises InvalidRequestError if the request could never run; from any thread."""
        prompt_length = len(request.prompt)
        if prompt_length == 0:
            raise InvalidRequestError("prompt", "is empty")
        if min(request.prompt) < 0:
            raise InvalidRequestError("prompt", f"{min(request.prompt)} is no token id")
        if prompt_length + 1 > self._max_length:
            raise InvalidRequestError(
                "prompt",
                f"{prompt_length} tokens leave no room for an output: prompt and output together "
                f"have at most {self._max_length} tokens",
            )
        if request.params.min_tokens and len(request.end_ids) > MAX_BANNED_IDS:
            raise InvalidRequestError(
                "min_tokens",
                f"{len(request.end_ids)} ids would end the request, and at most {MAX_BANNED_IDS} "
                "can be kept away",
            )
        max_generated = self.max_generated(request)
        if len(request.emitted) >= max_generated:
            raise InvalidRequestError(
                "emitted",
                f"{len(request.emitted)} tokens were generated already, of {max_generated}",
            )
        # The last token is never fed back, so the cache never holds it.
        pages = pages_for(prompt_length + max_generated - 1, self._page_size)
        if pages > self._pages:
            raise InvalidRequestError(
                "max_tokens",
                f"{prompt_length} prompt tokens and up to {max_generated} generated ones take "
                f"{pages} pages of {self._page_size} tokens, and a DP group has {self._pages}",
            )


class RequestChecks:
    """Makes requests for one model from the input of callers. Any thread may use it.

    Args:
      limits: refuse a request that could never run.
      vocab: token ids are below it.
      eos_token_ids: the model's end ids.
    """

    def __init__(self, limits: RequestLimits, vocab: int, eos_token_ids: frozenset[int]):
        self.limits, self._vocab, self._eos_token_ids = limits, vocab, eos_token_ids

    def request(
        self,
        prompt: Sequence[Any],
        params: SamplingParams,
        request_id: str,
        deadline: float | None,
        emitted: Sequence[Any] = (),
    ) -> Request:
        """Returns a checked request; its grammar has taken the tokens that were emitted before.

        Raises:
          InvalidRequestError: names the field.
        """
        params.validate()
        request = Request(
            request_id=request_id,
            prompt=checked_ids(prompt, self._vocab, "prompt"),
            emitted=checked_ids(emitted, self._vocab, "emitted"),
            params=params,
            eos_token_ids=self._eos_token_ids,
            seed=params.seed if params.seed is not None else random.getrandbits(32),
            arrival=time.monotonic(),
            deadline=deadline,
        )
        self.limits.check(request)
        for field in ("logit_bias", "logprob_token_ids"):
            if (largest := max(getattr(params, field), default=0)) >= self._vocab:
                wrong = f"token id {largest} is not in [0, {self._vocab - 1}]"
                raise InvalidRequestError(field, wrong)
        if params.grammar is not None:
            self._begin_grammar(params.grammar, request.emitted)
        return request

    def _begin_grammar(self, grammar: Any, emitted: list[int]) -> None:
        """Raises InvalidRequestError where the grammar does not fit the vocabulary."""
        try:
            for token_id in emitted:
                grammar.accept(token_id)
            mask = np.asarray(grammar.mask())
        except Exception as error:
            raise InvalidRequestError("grammar", str(error)) from error
        words = -(-self._vocab // 32)
        if mask.dtype != np.uint32 or mask.shape != (words,):
            raise InvalidRequestError(
                "grammar", f"its mask is {mask.dtype} {mask.shape}, not uint32 ({words},)"
            )


def checked_ids(given: Sequence[Any], vocab: int, field: str) -> list[int]:
    """Token ids as plain ints, which step plans can carry to other processes.

    Raises:
      InvalidRequestError: names the first one that is no integer in [0, vocab).
    """
    if not len(given) or (set(map(type, given)) == {int} and 0 <= min(given) <= max(given) < vocab):
        return list(given)
    token_ids = []
    for index, value in enumerate(given):  # NumPy's ints, or something wrong
        place = f"{field}[{index}]"
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InvalidRequestError(place, f"{value!r} is no token id")
        token_ids.append(operator.index(value))
        if not 0 <= token_ids[-1] < vocab:
            raise InvalidRequestError(place, f"token id {value} is not in [0, {vocab - 1}]")
    return token_ids
