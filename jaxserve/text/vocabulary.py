"""The vocabulary that `Tokenizer` uses: its base class, and its implementation for tokenizer.json.

`tiktoken_files.py` has another implementation. Called by `tokenizer.py`. Does not know which ids
begin or end a text.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers

from jaxserve.errors import CheckpointError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""SentencePiece's name of a byte token."""


MISSING = "the model folder has no tokenizer (tokenizer.json or tiktoken.model): send token ids"
"""Error message for callers that need text."""


class Vocabulary:
    """Text to ids and back, for one model. Immutable and safe for many threads.

    This class itself is the vocabulary of a model folder without a tokenizer: no token has a text,
    and texts cannot be encoded.

    Attributes:
      size: one more than the largest id; ids below it need not all exist.
      longest_token: upper bound of a token's length in characters; n tokens have at most n times as
        many.
      special_ids: ids of tokens that have no text.
    """

    longest_token = 1 << 20
    special_ids: frozenset[int] = frozenset()

    def __init__(self, size: int):
        self.size = size

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without added tokens. Names of special tokens become these
        tokens. Raises ValueError without a tokenizer."""
        raise ValueError(MISSING)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of ids. Unknown ids have no text, special ids only with `special`.
        Invalid UTF-8 becomes U+FFFD."""
        return ""

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token by its spelling."""
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, for a special one of its name; empty: unknown id."""
        return b""

    def has_text(self, token_id: int) -> bool:
        """Returns whether the id is that of a token that is not special."""
        return False

    def prefix(self, bos: int | None, add_bos: bool | None) -> list[int]:
        """Returns the ids to put before every prompt.

        Args:
          add_bos: whether bos is among them; None: as the vocabulary's file says.
        """
        return []


class TokenizersVocabulary(Vocabulary):
    """A tokenizer.json, through the tokenizers library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        """Takes ownership of a tokenizer; truncation and padding are switched off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        super().__init__(max(vocabulary.values(), default=-1) + 1)
        self.longest_token = max(map(len, vocabulary), default=0)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        decoder = json.loads(tokenizer.to_str())["decoder"]
        self._letters = _byte_letters() if '"ByteLevel"' in json.dumps(decoder) else None
        self.special_ids = frozenset(token_id for token_id in added if added[token_id].special)

    @classmethod
    def from_file(cls, path: Path) -> "TokenizersVocabulary":
        """Reads a tokenizer.json.

        Raises:
          CheckpointError: the file is truncated or no tokenizer.
        """
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the Rust side raises Exception itself
            raise CheckpointError(f"{path.name} is truncated or no tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        """See `Vocabulary`."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """See `Vocabulary`."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=not special)

    def token_to_id(self, token: str) -> int | None:
        """See `Vocabulary`."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """See `Vocabulary`."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._letters is not None:
            return bytes(self._letters[letter] for letter in token)
        if spelt := _BYTE.fullmatch(token):
            return bytes([int(spelt[1], 16)])
        return token.replace("▁", " ").encode()

    def has_text(self, token_id: int) -> bool:
        """See `Vocabulary`."""
        if token_id in self.special_ids:
            return False
        return self._tokenizer.id_to_token(token_id) is not None

    def prefix(self, bos: int | None, add_bos: bool | None) -> list[int]:
        """The ids that the file's post-processor puts before a text; empty if `add_bos` is False.
        With `add_bos`, bos is among them."""
        if add_bos is False:
            return []
        plain = self.encode("a")
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        added = len(full) - len(plain)
        start = next((n for n in range(added + 1) if full[n : n + len(plain)] == plain), 0)
        prefix = full[:start]
        if add_bos and bos is not None and bos not in prefix:
            prefix = [bos, *prefix]
        return prefix


def _byte_letters() -> dict[str, int]:
    """Maps letters to bytes as byte-level vocabularies spell them (GPT-2): printable Latin-1 stands
    for itself; the other bytes, in order, are the letters from U+0100 on."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    letters = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}
