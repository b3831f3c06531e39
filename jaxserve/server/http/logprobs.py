"""Log-probabilities of tokens in the formats of completions, chats and vLLM's prompt_logprobs.

Called by `completions.py` and `chat.py`, with what the engine reported.
"""

from collections.abc import Sequence

from jaxserve.engine.logprobs import TokenLogprobs
from jaxserve.server.http.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from jaxserve.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON does not have."""


class CompletionLogprobsWriter:
    """Writes the log-probabilities of one choice incrementally, with text offsets.

    Args:
      tokenizer: gives the texts of tokens.
      ids: whether tokens are named by their ids.
    """

    def __init__(self, tokenizer: Tokenizer, ids: bool = False):
        self._tokenizer = tokenizer
        self._name = _id_of if ids else _text
        self._offset = 0

    def prompt(
        self, token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """Those of an echoed prompt, whose first token has none."""
        return self._logprobs(token_ids, found)

    def tokens(self, found: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Those of new tokens."""
        return self._logprobs([one.token_id for one in found], found)

    def _logprobs(
        self, token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, one in zip(token_ids, found, strict=True):
            text = _text(self._tokenizer, token_id)
            name = self._name(self._tokenizer, token_id)
            logprobs.tokens.append(name)
            logprobs.text_offset.append(self._offset)
            logprobs.token_logprobs.append(None if one is None else _number(one.logprob))
            rivals = None
            if one is not None:
                rivals = {
                    self._name(self._tokenizer, key): _number(value) for key, value in one.top
                }
                rivals.setdefault(name, _number(one.logprob))
            logprobs.top_logprobs.append(rivals)
            self._offset += len(text)
        return logprobs


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Concatenates the log-probabilities of consecutive tokens."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def chat_logprobs(
    tokenizer: Tokenizer, found: Sequence[TokenLogprobs], *, ids: bool = False
) -> ChatLogprobs:
    """The log-probabilities of an answer's tokens, named by their `ids` or texts."""
    content, name = [], _id_of if ids else _text
    for one in found:
        rivals = [
            TopLogprob(
                token=name(tokenizer, token_id),
                logprob=_number(logprob),
                bytes=list(tokenizer.token_bytes(token_id)),
            )
            for token_id, logprob in one.top
        ]
        content.append(
            ChatLogprob(
                token=name(tokenizer, one.token_id),
                logprob=_number(one.logprob),
                bytes=list(tokenizer.token_bytes(one.token_id)),
                top_logprobs=rivals,
            )
        )
    return ChatLogprobs(content=content)


def prompt_logprobs(
    tokenizer: Tokenizer, found: Sequence[TokenLogprobs | None] | None
) -> list[dict[str, PromptLogprob] | None] | None:
    """Those of a prompt in vLLM's format: for every position the token and its alternatives."""
    if found is None:
        return None
    places: list[dict[str, PromptLogprob] | None] = []
    for one in found:
        if one is None:
            places.append(None)
            continue
        place = {
            str(token_id): PromptLogprob(
                logprob=_number(logprob), rank=rank, decoded_token=_text(tokenizer, token_id)
            )
            for rank, (token_id, logprob) in enumerate(one.top, start=1)
        }
        own = PromptLogprob(
            logprob=_number(one.logprob), rank=None, decoded_token=_text(tokenizer, one.token_id)
        )
        place.setdefault(str(one.token_id), own)
        places.append(place)
    return places


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; an incomplete character is written as bytes, as OpenAI does."""
    found = tokenizer.token_bytes(token_id)
    try:
        return found.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _id_of(tokenizer: Tokenizer, token_id: int) -> str:
    """vLLM's name of a token without its text."""
    return f"token_id:{token_id}"


def _number(logprob: float) -> float:
    return max(logprob, LOWEST)
