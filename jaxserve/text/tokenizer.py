"""Text to token ids and back: the tokenizer of a checkpoint, whole texts and streams.

Three classes: `Tokenizer` (of a model folder), `IncrementalDetokenizer`
(ids in, text deltas out, whole characters only) and `StopMatcher` (cuts a stream of text at the
first stop string). Called by `generation.py`, `generator.py` and `llm.py`.
Knows nothing of engines, requests or networks.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxserve.config.special_tokens import SpecialTokens, collect_special_tokens
from jaxserve.errors import CheckpointError
from jaxserve.storage.mirror import local_folder, weight_files
from jaxserve.text.tiktoken_files import TiktokenVocabulary
from jaxserve.text.vocabulary import TokenizersVocabulary, Vocabulary

REPLACEMENT = "\ufffd"
"""U+FFFD, which decoders write for bytes that are not (yet) a complete UTF-8 character."""

CHARACTER_TOKENS = 4
"""The most tokens that one character spans: four bytes in UTF-8, at least one byte a token."""

MAX_HELD_TOKENS = 8
"""Tokens that may wait for a character to be completed; bounds the work of one push."""


class Tokenizer:
    """The tokenizer of a checkpoint. Immutable after construction and safe for many threads.

    Attributes:
      vocab_size: one more than the largest token id (ids below it need not all exist).
      bos_token_id: the id that starts a sequence, if the checkpoint names one.
      eos_token_ids: every id that ends a text.
      pad_token_id: the padding id, if the checkpoint names one.
      special_ids: ids of the tokens that have no text.
      longest_token: characters of the longest token, added ones included; a text of n tokens has
        at most n times as many.
      knows_text: False where the checkpoint has no tokenizer, only token ids.
    """

    def __init__(self, vocabulary: Vocabulary, special: SpecialTokens):
        """Combines a vocabulary, from tokenizer.json or tiktoken.model, with the special ids that
        the checkpoint names. Where these do not say whether prompts start with bos, the
        vocabulary's file does."""
        self._vocabulary = vocabulary
        self.bos_token_id, self.eos_token_ids = special.bos, special.eos
        self.pad_token_id = special.pad
        self.vocab_size = vocabulary.size
        self.special_ids = vocabulary.special_ids
        self.longest_token = vocabulary.longest_token
        self.knows_text = type(vocabulary) is not Vocabulary
        self._prefix = vocabulary.prefix(special.bos, special.add_bos)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads tokenizer.json or tiktoken.model, and special ids from the files next to it. If a
        model folder has neither, the tokenizer refuses texts.

        Raises:
          CheckpointError: the folder has neither a tokenizer nor weights, a file is truncated or
            wrong, or the tokenizer has more ids than the model; lists all problems.
        """
        folder = local_folder(folder)
        problems: list[str] = []
        special = collect_special_tokens(folder, problems)
        vocabulary = _read_vocabulary(folder, special, problems)
        rows = special.vocab_size
        if vocabulary is not None and rows is not None and vocabulary.size > rows:
            problems.append(
                f"token ids go up to {vocabulary.size - 1}, but vocab_size = {rows} in config.json"
            )
        if problems or vocabulary is None:
            raise CheckpointError(f"tokenizer of {folder}: " + "; ".join(problems))
        return cls(vocabulary, special)

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Tokenises a prompt, with one bos in front if the checkpoint asks for it.

        Args:
          text: may spell special tokens.
          add_bos: False for a chat prompt, whose template writes its own special tokens.

        Raises:
          ValueError: `text` has lone surrogates, so it is not valid Unicode; or the model has no
            tokenizer.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"no Unicode text: lone surrogate at {error.start}") from None
        ids = self._vocabulary.encode(text)
        if not add_bos or ids[: len(self._prefix)] == self._prefix:
            return ids
        return self._prefix + ids

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of the ids. Unknown ids have none; special tokens only with `special`."""
        return self._vocabulary.decode(token_ids, special=special)

    def has_text(self, token_id: int) -> bool:
        """Whether the id names a token that is not special."""
        return self._vocabulary.has_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; for a special token, those of its name."""
        return self._vocabulary.token_bytes(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its text or, for a special token, its name."""
        return self._vocabulary.token_to_id(token)


def _read_vocabulary(
    folder: Path, special: SpecialTokens, problems: list[str]
) -> Vocabulary | None:
    """The folder's vocabulary; tokenizer.json takes precedence over tiktoken.model."""
    json_path, ranks_path = folder / "tokenizer.json", folder / "tiktoken.model"
    try:
        if json_path.is_file():
            return TokenizersVocabulary.from_file(json_path)
        if ranks_path.is_file():
            return TiktokenVocabulary.from_file(ranks_path, special.added, special.tokenizer_class)
    except CheckpointError as error:
        problems.append(str(error))
        return None
    if weight_files(folder) or any(path.is_dir() for path in folder.iterdir()):
        return Vocabulary(special.vocab_size or 0)
    problems.append(f"no file {json_path.name} or {ranks_path.name}")
    return None


class IncrementalDetokenizer:
    """Turns one request's token ids into text incrementally, never splitting a character.

    Decoding depends on earlier tokens (a leading space, a character spread over several tokens),
    so a few of them are decoded again with the new ones and their known text is cut off. This
    window begins at the last complete character, so the total cost is linear in the tokens.

    The deltas, `finish()` included, join to `Tokenizer.decode` of all ids. The one exception is
    a byte-fallback decoder (SentencePiece) given invalid UTF-8: it accepts or rejects a run of byte
    tokens as a whole, and characters of the run that were already returned cannot be taken back.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False):
        self._tokenizer = tokenizer
        self._special = special  # whether special tokens have text
        # The window: [0, context) was decoded and its text returned, the rest is pending.
        self._window: list[int] = []
        self._context = 0
        self._shown = 0  # characters of the window's text that were returned

    def push(self, token_ids: Iterable[int]) -> str:
        """Adds ids and returns the new text up to the last complete character, perhaps empty."""
        before = len(self._window)
        self._window += filter(self._has_text, token_ids)
        if len(self._window) == before:
            return ""
        text = self._decode(self._window)
        whole = len(text.rstrip(REPLACEMENT))
        delta = text[self._shown : whole]
        self._shown = max(self._shown, whole)
        if whole == len(text) and delta:
            # The context must not be empty: some decoders strip the first space of their input,
            # which must not be the first space of new text.
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = len(self._decode(self._window))
        elif len(self._window) - self._context > MAX_HELD_TOKENS:
            delta += self._release(text)
        return delta

    def finish(self) -> str:
        """The remaining text; an incomplete character becomes U+FFFD."""
        rest = self._decode(self._window)[self._shown :]
        self._window, self._context, self._shown = [], 0, 0
        return rest

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, special=self._special)

    def _has_text(self, token_id: int) -> bool:
        special = self._special and token_id in self._tokenizer.special_ids
        return special or self._tokenizer.has_text(token_id)

    def _release(self, text: str) -> str:
        """Releases the part of a long run of invalid bytes that no later token can change.

        The window can be cut where both sides decode separately to the same text as together: no
        character spans the cut. Of any four adjacent positions at least one is such a cut.
        """
        last = len(self._window)
        for cut in range(last - 1, max(self._context, last - 1 - CHARACTER_TOKENS), -1):
            left = self._decode(self._window[:cut])
            if left + self._decode(self._window[cut:]) == text:
                delta = left[self._shown :]
                self._window, self._context = self._window[cut:], 0
                self._shown = max(0, self._shown - len(left))
                return delta
        return ""


class StopMatcher:
    """Cuts a stream of text at the first stop string, holding back what may become one.

    The first is the one that is complete first; of several that end together, the longest. So the
    result does not depend on how the text was split into chunks.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text.

        Returns:
          the text that can be released, and the stop string that was found, if any; after that,
          `push` must not be called again.
        """
        seen, self._held = self._held + text, ""
        starts = [(seen.find(stop), stop) for stop in self._stops]
        if found := [(at + len(stop), at, stop) for at, stop in starts if at >= 0]:
            _, start, stop = min(found)
            return seen[:start], stop
        safe = len(seen) - max((unfinished(stop, seen) for stop in self._stops), default=0)
        self._held = seen[safe:]
        return seen[:safe], None

    def finish(self) -> str:
        """The text that was held back and did not become a stop string."""
        rest, self._held = self._held, ""
        return rest


def unfinished(mark: str, text: str) -> int:
    """The number of characters at the end of a text that may begin a mark."""
    longest = min(len(mark) - 1, len(text))
    return next(n for n in range(longest, -1, -1) if mark.startswith(text[len(text) - n :]))
