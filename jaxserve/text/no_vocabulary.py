"""Stand-in for the vocabulary of a model folder without a tokenizer: token ids in, token ids out.

Made by `tokenizer.py`.
"""

from collections.abc import Sequence

MISSING = "the model folder has no tokenizer (tokenizer.json or tiktoken.model): send token ids"
"""Error message for callers that need text."""


class NoVocabulary:
    """A `Vocabulary` without texts: no token has a text, and texts cannot be encoded.

    Args:
      size: size of the model's vocabulary.
    """

    longest_token = 1 << 20
    special_ids: frozenset[int] = frozenset()

    def __init__(self, size: int):
        self.size = size

    def encode(self, text: str) -> list[int]:
        """Raises ValueError."""
        raise ValueError(MISSING)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Returns an empty text."""
        return ""

    def token_to_id(self, token: str) -> int | None:
        """Returns None: no token has a spelling."""
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """Returns empty bytes."""
        return b""

    def has_text(self, token_id: int) -> bool:
        """Returns False."""
        return False

    def prefix(self, bos: int | None, add_bos: bool | None) -> list[int]:
        """Returns an empty prefix: prompts of token ids are taken unchanged."""
        return []
