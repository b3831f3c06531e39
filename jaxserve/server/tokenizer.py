"""Text to token ids and back: the tokenizer of a checkpoint, and what a stream of ids needs.

Three pieces, from whole texts to streams: `Tokenizer` (tokenizer.json in Hugging Face layout),
`IncrementalDetokenizer` (ids in, text deltas out, whole characters only) and `StopMatcher` (cuts
a stream of text at the first stop string). Called by `generation.py` and `llm.py`.
Knows nothing of engines, requests or networks.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.errors import CheckpointError

REPLACEMENT = "\ufffd"
"""U+FFFD: what decoders write for bytes that are no (or not yet a whole) UTF-8 character."""

CHARACTER_TOKENS = 4
"""Tokens that one character spans at most: UTF-8 takes four bytes, a token at least one."""

MAX_HELD_TOKENS = 8
"""Tokens that may wait for a character to be completed; bounds the work of one push."""


class Tokenizer:
    """The tokenizer of a checkpoint. Immutable after construction and safe for many threads.

    Attributes:
      vocab_size: one more than the largest token id (ids below it need not all exist).
      bos_token_id: the id that starts a sequence, if the checkpoint names one.
      eos_token_ids: every id that ends a text.
      pad_token_id: the padding id, if the checkpoint names one.
      longest_token: characters of the longest token, added ones included; a text of n tokens has
        at most n times as many.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        pad_token_id: int | None = None,
        add_bos: bool | None = None,
    ):
        """Wraps a Rust tokenizer.

        Args:
          tokenizer: taken over; truncation and padding are switched off.
          bos_token_id, eos_token_ids, pad_token_id: as the checkpoint says.
          add_bos: whether prompts start with bos. None: as tokenizer.json's post-processor does.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pad_token_id = pad_token_id
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=0)
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._prefix = _prompt_prefix(tokenizer, bos_token_id, add_bos)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads tokenizer.json and the special ids from the configurations next to it.

        End ids are all that config.json, generation_config.json and tokenizer_config.json name.

        Raises:
          CheckpointError: tokenizer.json is missing, or a file is truncated or wrong; lists all.
        """
        folder = Path(folder)
        problems: list[str] = []
        tokenizer = _read_tokenizer(folder / "tokenizer.json", problems)
        config = _read_json(folder / "config.json", problems)
        generation = _read_json(folder / "generation_config.json", problems)
        names = _read_json(folder / "tokenizer_config.json", problems)
        nested = config.get("text_config")
        numbered = [generation, config, nested if isinstance(nested, dict) else {}]
        ids = {
            kind: _special_ids(kind, numbered, names, tokenizer, problems)
            for kind in ("bos", "eos", "pad")
        }
        if problems or tokenizer is None:
            raise CheckpointError(f"tokenizer of {folder}: " + "; ".join(problems))
        add_bos = names.get("add_bos_token")
        return cls(
            tokenizer,
            bos_token_id=next(iter(ids["bos"]), None),
            eos_token_ids=ids["eos"],
            pad_token_id=next(iter(ids["pad"]), None),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
        )

    def encode(self, text: str) -> list[int]:
        """The prompt's token ids, with bos in front where the checkpoint wants it, once.

        Raises:
          ValueError: `text` has lone surrogates, so it is no Unicode text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"no Unicode text: lone surrogate at {error.start}") from None
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids; special tokens and ids without a token have none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def has_text(self, token_id: int) -> bool:
        """Whether the id names a token that is not special."""
        if token_id in self._special_ids:
            return False
        return self._tokenizer.id_to_token(token_id) is not None


class IncrementalDetokenizer:
    """Turns one request's token ids into text as they come, never splitting a character.

    Decoders look back (a leading space, bytes of one character over several tokens), so a few
    earlier tokens are decoded again with the new ones and the text they gave before is cut off.
    That window ends at the last whole character, so the total cost is linear in the tokens.

    The deltas, `finish()` included, join to `Tokenizer.decode` of all ids. The one exception is
    a byte-fallback decoder (SentencePiece) fed bytes that are no UTF-8: it judges a run of byte
    tokens only as a whole, and characters of the run that are already out cannot be taken back.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # The window: [0, settled) is context whose text is out, the rest is waiting.
        self._window: list[int] = []
        self._settled = 0
        self._shown = 0  # characters of the window's text that are out

    def push(self, token_ids: Iterable[int]) -> str:
        """Adds ids and returns the text that is new and whole, perhaps empty."""
        before = len(self._window)
        self._window += filter(self._tokenizer.has_text, token_ids)
        if len(self._window) == before:
            return ""
        text = self._tokenizer.decode(self._window)
        whole = len(text.rstrip(REPLACEMENT))
        delta = text[self._shown : whole]
        self._shown = max(self._shown, whole)
        if whole == len(text) and delta:
            # The context must have text of its own: a decoder that strips the first space of
            # what it is given has to find one there.
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._shown = len(self._tokenizer.decode(self._window))
        elif len(self._window) - self._settled > MAX_HELD_TOKENS:
            delta += self._let_go(text)
        return delta

    def finish(self) -> str:
        """The rest: what waited for a character that never came is written as U+FFFD."""
        rest = self._tokenizer.decode(self._window)[self._shown :]
        self._window, self._settled, self._shown = [], 0, 0
        return rest

    def _let_go(self, text: str) -> str:
        """Gives out what no later token can change of a long run of broken bytes.

        Tokens can be cut where both sides decode to the same text alone as together: no
        character spans the cut, so none ever will. One of any four neighbouring cuts is such.
        """
        last = len(self._window)
        for cut in range(last - 1, max(self._settled, last - 1 - CHARACTER_TOKENS), -1):
            left = self._tokenizer.decode(self._window[:cut])
            if left + self._tokenizer.decode(self._window[cut:]) == text:
                delta = left[self._shown :]
                self._window, self._settled = self._window[cut:], 0
                self._shown = max(0, self._shown - len(left))
                return delta
        return ""


class StopMatcher:
    """Cuts a stream of text where the first stop string ends, holding back what may become one.

    "First" is the string that is complete first; of several that end together the longest. So
    the result does not depend on how the text was cut into chunks. Knuth, Morris and Pratt's
    automaton for each string: constant work a character and string.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text.

        Returns:
          what can go out, and the stop string that was found; after one, push nothing more.
        """
        if not self._stops:
            return text, None
        for index, character in enumerate(text):
            for number, stop in enumerate(self._stops):
                matched, failure = self._matched[number], self._failures[number]
                while matched and stop[matched] != character:
                    matched = failure[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    seen = self._held + text[: index + 1]
                    self._held = ""
                    return seen[: len(seen) - len(stop)], stop
                self._matched[number] = matched
        seen = self._held + text
        safe = len(seen) - max(self._matched)
        self._held = seen[safe:]
        return seen[:safe], None

    def finish(self) -> str:
        """The text that was held back and became no stop string."""
        rest, self._held = self._held, ""
        return rest


def _failure_function(pattern: str) -> list[int]:
    """For every prefix of `pattern`, the length of its longest proper border (KMP)."""
    failure = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[index]:
            matched = failure[matched - 1]
        matched += pattern[matched] == pattern[index]
        failure[index] = matched
    return failure


def _prompt_prefix(
    tokenizer: tokenizers.Tokenizer, bos_token_id: int | None, add_bos: bool | None
) -> list[int]:
    """The ids in front of every prompt: what the post-processor adds, unless `add_bos` differs."""
    if add_bos is False:
        return []
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    added = len(full) - len(plain)
    start = next((n for n in range(added + 1) if full[n : n + len(plain)] == plain), 0)
    prefix = full[:start]
    if add_bos and bos_token_id is not None and bos_token_id not in prefix:
        prefix = [bos_token_id, *prefix]
    return prefix


def _read_tokenizer(path: Path, problems: list[str]) -> tokenizers.Tokenizer | None:
    if not path.is_file():
        problems.append(f"no file {path.name}")
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises Exception itself
        problems.append(f"{path.name} is truncated or no tokenizer: {error}")
        return None


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a JSON file; a missing file is an empty one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} is truncated or no JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds {type(value).__name__}, not an object")
        return {}
    return value


def _special_ids(
    kind: str,
    numbered: Sequence[Mapping[str, Any]],
    names: Mapping[str, Any],
    tokenizer: tokenizers.Tokenizer | None,
    problems: list[str],
) -> list[int]:
    """The ids of one kind ("bos", "eos", "pad"), most particular source first, no repeats."""
    ids: list[int] = []
    token = names.get(f"{kind}_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str) and tokenizer is not None:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            ids.append(token_id)
        elif kind != "pad":  # a padding token is often named and never made
            problems.append(f"{kind}_token {token!r} of tokenizer_config.json is no token")
    for config in numbered:
        value = config.get(f"{kind}_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None or token_id == -1:  # some checkpoints write -1 for none
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                problems.append(f"{kind}_token_id {token_id!r} is no token id")
            else:
                ids.append(token_id)
    return list(dict.fromkeys(ids))
