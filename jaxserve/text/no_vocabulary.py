"""What stands in for a tokenizer where a model folder has none: token ids in, token ids out.

Made by `tokenizer.py`.
"""

from collections.abc import Sequence

MISSING = "the model folder has no tokenizer (tokenizer.json or tiktoken.model): send token ids"
"""What whoever asks for text is told."""


class NoVocabulary:
    """A `Vocabulary` in which no token has a text, and no text tokens.

    Args:
      size: of the model's vocabulary.
    """

    longest_token = 1 << 20
    special_ids: frozenset[int] = frozenset()

    def __init__(self, size: int):
        self.size = size

    def encode(self, text: str) -> list[int]:
        """Raises ValueError."""
        raise ValueError(MISSING)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Nothing."""
        return ""

    def token_to_id(self, token: str) -> int | None:
        """None."""
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """None of them."""
        return b""

    def has_text(self, token_id: int) -> bool:
        """False."""
        return False

    def prefix(self, bos: int | None, add_bos: bool | None) -> list[int]:
        """Nothing: prompts of token ids are taken as they are."""
        return []
