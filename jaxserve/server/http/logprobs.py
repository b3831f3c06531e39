"""Log-probabilities of tokens in the formats of completions, chats, responses and prompts.

Called by `completions.py`, `chat.py` and `event_routes.py`, with what the engine reported.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from jaxserve.engine.request import TokenLogprobs
from jaxserve.server.http.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from jaxserve.text.answers import AnswerParser, Piece, joined, kind_of
from jaxserve.text.tokenizer import IncrementalDetokenizer, Tokenizer

LOWEST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON does not have."""


class CompletionLogprobsWriter:
    """Writes the log-probabilities of one choice incrementally, with text offsets.

    Args:
      tokenizer: gives the texts of tokens.
      ids: whether tokens are named by their ids.
      special: whether special tokens have text in the completion.
    """

    def __init__(self, tokenizer: Tokenizer, ids: bool = False, special: bool = False):
        self._tokenizer = tokenizer
        self._name = _id_of if ids else _text
        self._offset = 0  # of the first character that is not complete yet
        self._detokenizer = IncrementalDetokenizer(tokenizer, special=special)

    def prompt(
        self, token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """Log-probabilities of an echoed prompt, whose first token has none."""
        logprobs = self._logprobs(token_ids, found)
        self._offset += len(self._detokenizer.finish())
        return logprobs

    def tokens(self, found: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Log-probabilities of new tokens."""
        return self._logprobs([one.token_id for one in found], found)

    def _logprobs(
        self, token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, one in zip(token_ids, found, strict=True):
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
            self._offset += len(self._detokenizer.push([token_id]))
        return logprobs


def concatenated(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Concatenates the log-probabilities of consecutive tokens."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def chat_logprobs(
    tokenizer: Tokenizer, found: Sequence[TokenLogprobs], *, ids: bool = False, own: bool = False
) -> ChatLogprobs:
    """Log-probabilities of tokens, named by `ids` or texts; `own`: each is among its rivals."""
    content, name = [], _id_of if ids else _text
    for one in found:
        rivals = [
            TopLogprob(
                token=name(tokenizer, token_id),
                logprob=_number(logprob),
                bytes=list(tokenizer.token_bytes(token_id)),
            )
            for token_id, logprob in (
                {one.token_id: one.logprob, **dict(one.top)}.items() if own else one.top
            )
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


class MessageLogprobs:
    """Parses an answer and says which of its tokens each piece of the message consists of.

    A token belongs to the message if one of its characters does, and is told with the first piece
    that has one. Tokens of the reasoning, of calls, of markers and of a stop string belong to none.

    Args:
      parser: of the answer.
      tokenizer: names the tokens.
      special: whether special tokens have text in the answer.
    """

    def __init__(self, parser: AnswerParser, tokenizer: Tokenizer, *, special: bool):
        self._parser = parser
        self._tokenizer = tokenizer
        self._special = special
        self._detokenizer = IncrementalDetokenizer(tokenizer, special=special)
        self._read = 0  # characters of the answer
        self._complete = 0  # characters of the tokens
        self._tokens: deque[tuple[int, int, ChatLogprob]] = deque()  # first character, end
        self._wanted = False

    def push(
        self, text: str, found: Sequence[TokenLogprobs]
    ) -> Iterator[tuple[Piece, list[ChatLogprob]]]:
        """The pieces that are certain now, each with its tokens.

        Args:
          text: the answer's new text.
          found: the new tokens, if the request asks for them; the text may lag behind them.
        """
        self._wanted |= bool(found)
        for one, token in zip(found, chat_logprobs(self._tokenizer, found).content, strict=True):
            begin = self._complete
            self._complete += len(self._detokenizer.push([one.token_id]))
            if self._special or self._tokenizer.has_text(one.token_id):
                # A token without a complete character belongs to the one that it begins.
                self._tokens.append((begin, max(self._complete, begin + 1), token))
        # By character, because then a piece of the message ends where the parser's `held` begins.
        portions = list(text) if self._wanted else [text]
        told = [one for portion in portions for one in self._pushed(portion)]
        for _, group in itertools.groupby(told, lambda one: kind_of(one[0])):
            pieces, tokens = zip(*group, strict=True)
            yield joined(pieces)[0], list(itertools.chain(*tokens))

    def finish(self, *, cut: bool) -> Iterator[tuple[Piece, list[ChatLogprob]]]:
        """Ends the answer, which was `cut` off or is complete; the remaining pieces."""
        return self._told(self._parser.finish(cut=cut))

    def _pushed(self, text: str) -> Iterator[tuple[Piece, list[ChatLogprob]]]:
        self._read += len(text)
        return self._told(self._parser.push(text))

    def _told(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, list[ChatLogprob]]]:
        end = self._read - len(self._parser.held)
        for piece in pieces:
            told = []
            while piece.content and self._tokens and self._tokens[0][0] < end:
                _, token_end, token = self._tokens.popleft()
                if token_end > end - len(piece.content):
                    told.append(token)
            yield piece, told


def prompt_logprobs(
    tokenizer: Tokenizer, found: Sequence[TokenLogprobs | None] | None
) -> list[dict[str, PromptLogprob] | None] | None:
    """A prompt's log-probabilities in vLLM's format: each position's token and alternatives."""
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
