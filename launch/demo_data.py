"""Text of the demo checkpoint: the Python standard library, its split and its tokenizer.

Called by `train_demo.py`. Knows nothing of the model.

Every `.py` file of the running interpreter's library belongs to one of three parts:

* `held_out`: about one library file in twenty, chosen by a hash of its relative path;
* `library`: the other library files;
* `test`: CPython's own test suite, further training text of the same language. A test file whose
  name holds the name of a held-out module (`test/test_heapq.py`) is left out of everything.
"""

import hashlib
import itertools
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN = "<|begin|>"
END = "<|end|>"

HELD_OUT_PER_MILLE = 40

# Mean length of the parts that training text is encoded in.
CUT_CHARACTERS = 300

# Not prose by programmers: third-party packages, generated tables (character maps, the help text
# of `pydoc`), and grammar-test data that is not meant to be valid Python.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "encodings", "pydoc_data", "lib2to3", "__phello__", "__pycache__"}
)
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")

# Pieces inside which pairs may merge: dunder names, a word with one leading character (space, dot,
# underscore, quote or bracket), up to three digits, punctuation together with the line break and
# indentation after it, line breaks with indentation, and other runs of white space.
PIECE_PATTERN = (
    r"[ .]?__\p{L}+__"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+(?:\n[ \t\n]*)?"
    r"|\n\s*"
    r"|[^\S\n]+(?=\S)"
    r"|\s+"
)


@dataclass(frozen=True)
class SourceFile:
    """One source file: `name` is the path relative to the library's root, with `/`."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The three disjoint parts of the standard library's source text, each sorted by name."""

    library: list[SourceFile]
    test: list[SourceFile]
    held_out: list[SourceFile]


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads the standard library under `root` (default: that of the running interpreter).

    The split depends on relative paths only, so it is the same on every machine with the same
    Python version. Files that are not UTF-8 are left out.
    """
    root = Path(root or sysconfig.get_path("stdlib"))
    library: list[SourceFile] = []
    test: list[SourceFile] = []
    held_out: list[SourceFile] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        names = relative.parts
        if any(one in SKIPPED_FOLDERS or one.startswith(SKIPPED_PREFIXES) for one in names):
            continue
        text = _read_utf8(path)
        if text is None:
            continue
        file = SourceFile(relative.as_posix(), text)
        if not {"test", "tests", "idle_test"}.isdisjoint(names[:-1]):
            test.append(file)
        elif _per_mille(file.name) < HELD_OUT_PER_MILLE:
            held_out.append(file)
        else:
            library.append(file)
    if not library or not held_out:
        raise FileNotFoundError(f"no standard library source text under {root}")
    held_out_modules = {Path(file.name).stem for file in held_out} - {"__init__", "__main__"}
    test = [file for file in test if not _tests_any(file.name, held_out_modules)]
    return Corpus(library, test, held_out)


def _tests_any(name: str, modules: set[str]) -> bool:
    stem = Path(name).stem
    return stem.startswith("test_") and stem.removeprefix("test_") in modules


def _read_utf8(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def _per_mille(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 1000


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over `texts`; ids 0 and 1 are `<|begin|>` and `<|end|>`.

    Every text round-trips exactly. `encode` puts `<|begin|>` in front unless it is told
    `add_special_tokens=False`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, 0)]
    )
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """The ids of `<|begin|>` and `<|end|>`. Raises ValueError if the tokenizer lacks one."""
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    if begin is None or end is None:
        raise ValueError(f"the tokenizer lacks {BEGIN} or {END}")
    return begin, end


def pack(files: list[SourceFile], tokenizer: Tokenizer) -> np.ndarray:
    """Files as one token stream, `<|begin|> … <|end|>` each, in an order unrelated to names.

    Each file is encoded in the parts that `cut` makes of it.

    Returns: int32 [tokens].
    """
    ordered = sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())
    begin, end = special_ids(tokenizer)
    streams = [np.empty(0, np.int32)]
    for file in ordered:
        parts = tokenizer.encode_batch(cut(file), add_special_tokens=False)
        ids = [token for part in parts for token in part.ids]
        streams.append(np.array([begin, *ids, end], np.int32))
    return np.concatenate(streams)


def cut(file: SourceFile) -> list[str]:
    """The file in parts of about CUT_CHARACTERS, the same at every call.

    A prompt ends where its author stops, a token where a merge ends: without cuts the model would
    never have seen a colon without its line break, and would not know how to go on from one.
    Every other cut is at the end of a line, the others are anywhere.
    """
    random = np.random.default_rng(_per_mille(file.name))
    places = random.integers(0, len(file.text) + 1, len(file.text) // CUT_CHARACTERS)
    ends = [max(file.text.find("\n", place), 0) for place in places[::2]]
    places = sorted({0, *ends, *places[1::2].tolist(), len(file.text)})
    return [file.text[start:stop] for start, stop in itertools.pairwise(places)]


class WindowStream:
    """Windows of a token stream, drawn without replacement, epoch after epoch.

    An epoch cuts the stream at a random phase into windows that advance by `length` tokens, and
    visits them in random order.
    """

    def __init__(self, tokens: np.ndarray, seed: int):
        self.tokens, self.seed, self.epoch, self.cursor = tokens, seed, 0, 0
        self._length = 0
        self._starts = np.empty(0, np.int64)

    def next_window(self, length: int, extra: int) -> np.ndarray:
        """Returns int32 [length + extra]: `length` positions and the `extra` targets after them."""
        if length + extra >= len(self.tokens):
            raise ValueError(f"windows of {length + extra} from {len(self.tokens)} tokens")
        if length != self._length:
            self._enter_epoch(length, extra)
        if self.cursor >= len(self._starts):
            self.epoch, self.cursor = self.epoch + 1, 0
            self._enter_epoch(length, extra)
        start = self._starts[self.cursor]
        self.cursor += 1
        return self.tokens[start : start + length + extra]

    def _enter_epoch(self, length: int, extra: int) -> None:
        if self._length and length != self._length:
            self.epoch, self.cursor = self.epoch + 1, 0
        self._length = length
        random = np.random.default_rng([self.seed, self.epoch, length])
        phase = int(random.integers(length))
        starts = np.arange(phase, len(self.tokens) - length - extra + 1, length)
        self._starts = random.permutation(starts)
