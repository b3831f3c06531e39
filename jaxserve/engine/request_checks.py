"""Checks whether a request may run, and says when it is due.

Called by the engine, and by a router before it sends a request to a worker. Knows no sequences and
no page pools, so that a router does not reach them.
"""

import operator
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve.engine.pages import pages_for
from jaxserve.engine.request import MAX_BANNED_IDS, Request, SamplingParams
from jaxserve.errors import InvalidRequestError

PATIENCE = 10.0
"""Seconds after which a request of priority 0 is due; every priority adds or takes as many."""


def due(request: Request) -> float:
    """When a request should be served, in seconds of its arrival's clock."""
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
      check: raises InvalidRequestError for a request that could never run.
      vocab: token ids are below it.
      eos_token_ids: the model's end ids.
    """

    def __init__(self, check: Callable[[Request], None], vocab: int, eos_token_ids: frozenset[int]):
        self._check, self._vocab, self._eos_token_ids = check, vocab, eos_token_ids

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
        self._check(request)
        for token_id in params.logit_bias:
            if token_id >= self._vocab:
                raise InvalidRequestError(
                    "logit_bias", f"token id {token_id} is not in [0, {self._vocab - 1}]"
                )
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
