"""Whether a request may run: made of what a caller gave, with every field checked.

Called by whoever takes requests: the engine, and the router before it sends one to a worker.
"""

import operator
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve.engine.request import Request, SamplingParams
from jaxserve.errors import InvalidRequestError


class RequestChecks:
    """Of one model and its limits. Any thread may use it.

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
        """A checked request; its grammar has taken the tokens that were emitted before.

        Raises:
          InvalidRequestError: names the field.
        """
        params.validate()
        if not len(prompt):
            raise InvalidRequestError("prompt", "is empty")
        request = Request(
            request_id=request_id,
            prompt=self._token_ids("prompt", prompt),
            emitted=self._token_ids("emitted", emitted),
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

    def _token_ids(self, field: str, given: Sequence[Any]) -> list[int]:
        """Plain ints, which step plans can carry to other processes."""
        if set(map(type, given)) <= {int} and (
            not len(given) or (min(given) >= 0 and max(given) < self._vocab)
        ):
            return list(given)
        token_ids = []
        for place, token in enumerate(given):
            try:
                token_id = operator.index(token)
            except TypeError:
                raise InvalidRequestError(
                    f"{field}[{place}]", f"{token!r} is no token id"
                ) from None
            if not 0 <= token_id < self._vocab:
                raise InvalidRequestError(
                    f"{field}[{place}]", f"token id {token_id} is not in [0, {self._vocab - 1}]"
                )
            token_ids.append(token_id)
        return token_ids

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
