"""The special tokens of a model folder: ids that begin, end and pad a text, and their spelling.

The one place that knows which files define them: config.json (and its `text_config`),
generation_config.json, tokenizer_config.json, special_tokens_map.json, and for the ids of spelt
tokens tokenizer.json. Called by the engine (end ids) and by `server` (tokenizer, chat templates).
Knows nothing of tokenizers' libraries.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.errors import CheckpointError
from jaxserve.storage.mirror import local_folder

KINDS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is not part of the tokenizer's ordinary vocabulary.

    Attributes:
      content: its spelling, which a prompt may contain.
      special: whether decoding leaves it out.
    """

    content: str
    special: bool = False


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The special tokens that a model folder defines.

    Attributes:
      bos: the id that begins a text, if there is one.
      eos: every id that ends a text.
      pad: the padding id, if there is one.
      texts: `bos_token`, `eos_token`, ... → spelling, for chat templates.
      add_bos: whether prompts are prefixed with bos; None: not specified.
      added: `added_tokens_decoder` of tokenizer_config.json: id → token.
      tokenizer_class: of tokenizer_config.json, if given.
      vocab_size: rows of the model's embedding, if config.json gives it.
    """

    bos: int | None = None
    eos: frozenset[int] = frozenset()
    pad: int | None = None
    texts: dict[str, str] = {}
    add_bos: bool | None = None
    added: dict[int, AddedToken] = {}
    tokenizer_class: str | None = None
    vocab_size: int | None = None


def read_special_tokens(folder: str | Path) -> SpecialTokens:
    """Reads a folder's files; a missing file counts as empty.

    Raises:
      CheckpointError: lists every malformed file and every invalid id or token.
    """
    problems: list[str] = []
    special = collect_special_tokens(local_folder(folder), problems)
    if problems:
        raise CheckpointError(f"special tokens of {folder}: " + "; ".join(problems))
    return special


def collect_special_tokens(folder: Path, problems: list[str]) -> SpecialTokens:
    """`read_special_tokens` that appends to `problems` instead of raising."""
    config = read_json(folder / "config.json", problems)
    generation = read_json(folder / "generation_config.json", problems)
    names = read_json(folder / "tokenizer_config.json", problems)
    texts = special_token_texts(folder, names, problems)
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else {}
    added = _added_tokens(names, problems)
    spelt = {token.content: token_id for token_id, token in added.items()}
    ids: dict[str, list[int]] = {}
    for kind in ("bos", "eos", "pad"):
        ids[kind] = list(_numbered(kind, (generation, config, text), problems))
        token = texts.get(f"{kind}_token")
        if token is not None and token not in spelt:  # read only if needed: it is large
            spelt = _file_ids(folder / "tokenizer.json") | spelt
        token_id = spelt.get(token or "")
        if token_id is not None:
            ids[kind].insert(0, token_id)
        elif token is not None and kind != "pad":  # pad is often named, never added
            problems.append(f"{kind}_token {token!r} of tokenizer_config.json is no token")
    add_bos = names.get("add_bos_token")
    tokenizer_class = names.get("tokenizer_class")
    size = text.get("vocab_size", config.get("vocab_size"))
    return SpecialTokens(
        bos=next(iter(ids["bos"]), None),
        eos=frozenset(ids["eos"]),
        pad=next(iter(ids["pad"]), None),
        texts=texts,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        added=added,
        tokenizer_class=tokenizer_class if isinstance(tokenizer_class, str) else None,
        vocab_size=size if isinstance(size, int) and not isinstance(size, bool) else None,
    )


def special_token_texts(
    folder: Path, names: Mapping[str, Any], problems: list[str]
) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... → spelling; `names` is tokenizer_config.json, which wins."""
    legacy = read_json(folder / "special_tokens_map.json", problems)
    return _texts(legacy) | _texts(names)


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The JSON object in a file; {} if the file is missing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} is truncated or no JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds {type(value).__name__}, not an object")
        return {}
    return value


def _texts(names: Mapping[str, Any]) -> dict[str, str]:
    """The spelling of every special token that is named, as a text or as an object."""
    texts = {}
    for kind in KINDS:
        token = names.get(f"{kind}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            texts[f"{kind}_token"] = token
    return texts


def _added_tokens(names: Mapping[str, Any], problems: list[str]) -> dict[int, AddedToken]:
    try:
        return msgspec.convert(
            names.get("added_tokens_decoder") or {}, dict[int, AddedToken], strict=False
        )
    except msgspec.ValidationError as error:
        problems.append(f"added_tokens_decoder of tokenizer_config.json: {error}")
        return {}


def _numbered(
    kind: str, configs: tuple[Mapping[str, Any], ...], problems: list[str]
) -> Iterator[int]:
    """The ids of one kind, from the most specific file that defines them."""
    for config in configs:
        value = config.get(f"{kind}_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None or token_id == -1:  # some checkpoints write -1 for none
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                problems.append(f"{kind}_token_id {token_id!r} is no token id")
            else:
                yield token_id


class _FileToken(AddedToken, frozen=True, kw_only=True):
    id: int


class _FileModel(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    """Token → id, or Unigram's tokens and scores, by id."""


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is needed here; the rest is skipped."""

    added_tokens: list[_FileToken] = []
    model: _FileModel | None = None


def _file_ids(path: Path) -> dict[str, int]:
    """Spelling → id of all tokens of a tokenizer.json; empty if it cannot be read."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.MsgspecError):  # its reader reports it
        return {}
    vocab = file.model.vocab if file.model else {}
    if isinstance(vocab, list):
        vocab = {token: token_id for token_id, (token, _) in enumerate(vocab)}
    return vocab | {token.content: token.id for token in file.added_tokens}
