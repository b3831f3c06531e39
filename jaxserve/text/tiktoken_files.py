"""Vocabularies in tiktoken's format (`tiktoken.model`), which Kimi K2 uses.

The file lists the byte strings of the vocabulary by rank. The special tokens are in
tokenizer_config.json. The pattern that splits text into pieces exists only in the model's own code,
which we do not run, so it is repeated here. Encoding is the tiktoken package's, an
optional extra, because it is what such models were trained with: its order of merges and its
Unicode tables are theirs by construction. Called by `tokenizer.py`.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxserve.config.special_tokens import AddedToken
from jaxserve.errors import CheckpointError
from jaxserve.text.vocabulary import Vocabulary

CLASSES = ("TikTokenTokenizer",)
"""Values of `tokenizer_class` that split text by PATTERN (Kimi)."""

MAX_CHARACTERS = 400_000
"""Characters that are encoded at once, as in Kimi's code: splitting changes the tokens there."""
MAX_RUN = 25_000
"""Longest run of white space, or of anything else, that is encoded at once; likewise."""

# Chinese characters stand for themselves; elsewhere a word is capitals and then small letters, with
# one character before it and an English ending after it (o200k's rules).
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"\p{Han}+",
        f"{_BEFORE}{_CAPITALS}*{_SMALL}+{_ENDING}",
        f"{_BEFORE}{_CAPITALS}+{_SMALL}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Kimi's pre-tokenisation: bytes merge only within a match."""

_RUN = re.compile(r"\s+|\S+")


class TiktokenVocabulary(Vocabulary):
    """Byte-pair encoding by ranks; a `vocabulary.Vocabulary`."""

    def __init__(self, ranks: Mapping[bytes, int], added: Mapping[int, AddedToken]):
        """Builds the encoder.

        Args:
          ranks: byte string → id; the lower of two possible merges comes first.
          added: id → token, none of them among the ranks.

        Raises:
          CheckpointError: the package tiktoken is missing, or the ids do not fit.
        """
        try:
            import tiktoken
        except ImportError:
            raise CheckpointError(
                "tiktoken.model takes the package tiktoken: pip install 'jaxserve[tiktoken]'"
            ) from None
        _check(ranks, added)
        self._ids = {token.content: token_id for token_id, token in added.items()}
        self._encoding = tiktoken.Encoding(
            "jaxserve", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=self._ids
        )
        self._ranks = ranks
        self.special_ids = frozenset(key for key, token in added.items() if token.special)
        self._with_text = frozenset([*ranks.values(), *added]) - self.special_ids
        super().__init__(max([*ranks.values(), *added]) + 1)
        self.longest_token = max(map(len, [*ranks, *self._ids]))

    @classmethod
    def from_file(
        cls, path: Path, added: Mapping[int, AddedToken], tokenizer_class: str | None = None
    ) -> "TiktokenVocabulary":
        """Reads a ranks file.

        Raises:
          CheckpointError: the file is wrong, the class is not one of CLASSES, or tiktoken is
            missing.
        """
        if tokenizer_class is not None and tokenizer_class not in CLASSES:
            raise CheckpointError(
                f"{path.name}: how a {tokenizer_class} cuts text is not known; known: "
                + ", ".join(CLASSES)
            )
        return cls(read_ranks(path), added)

    def encode(self, text: str) -> list[int]:
        """See `Vocabulary`."""
        return [
            token_id
            for part in _parts(text)
            for token_id in self._encoding.encode(part, allowed_special="all")
        ]

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """See `Vocabulary`."""
        wanted = self._with_text | self.special_ids if special else self._with_text
        known = [token_id for token_id in token_ids if token_id in wanted]
        return self._encoding.decode_bytes(known).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See `Vocabulary`."""
        try:
            return self._encoding.decode_single_token_bytes(token_id)
        except KeyError:
            return b""

    def token_to_id(self, token: str) -> int | None:
        """See `Vocabulary`."""
        return self._ids.get(token, self._ranks.get(token.encode()))

    def has_text(self, token_id: int) -> bool:
        """See `Vocabulary`."""
        return token_id in self._with_text

    def prefix(self, bos: int | None, add_bos: bool | None) -> list[int]:
        """Bos where the configuration asks for it; the ranks file does not say."""
        return [bos] if add_bos and bos is not None else []


def read_ranks(path: Path) -> dict[bytes, int]:
    """The ranks file: on every line a byte string in base64 and its rank.

    Raises:
      CheckpointError: names the first line that is wrong.
    """
    ranks = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror or error}") from None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{path.name}, line {number}: expected a token in base64 and its rank"
            ) from None
    return ranks


def _check(ranks: Mapping[bytes, int], added: Mapping[int, AddedToken]) -> None:
    problems = []
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        problems.append(f"{missing} of the 256 single bytes have no rank")
    ids = set(ranks.values())
    if len(ids) < len(ranks):
        problems.append(f"{len(ranks)} tokens share {len(ids)} ranks")
    if ids and min(ids) < 0:
        problems.append(f"rank {min(ids)} is negative")
    shared = sorted(ids & set(added))
    if shared:
        problems.append(f"added token {shared[0]} ({added[shared[0]].content}) is also a rank")
    spelt = {token.content for token in added.values()}
    if len(spelt) < len(added):
        problems.append(f"{len(added)} added tokens have {len(spelt)} spellings")
    if problems:
        raise CheckpointError("tiktoken.model: " + "; ".join(problems))


def _parts(text: str) -> Iterator[str]:
    """Splits a text into the parts that are encoded separately; nearly always one."""
    for start in range(0, len(text), MAX_CHARACTERS):
        part = text[start : start + MAX_CHARACTERS]
        begin = 0
        for run in _RUN.finditer(part) if len(part) > MAX_RUN else ():
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]
