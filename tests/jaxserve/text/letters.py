"""A tokenizer small enough to count in one's head: one token a byte."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.config.special_tokens import SpecialTokens
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import TokenizersVocabulary

BOS, EOS = 0, 1


def raw_letters(count: int | None = None) -> tokenizers.Tokenizer:
    """<s> = 0, </s> = 1, every byte's own letter from 2 on: `count` tokens, or all."""
    letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {letter: index for index, letter in enumerate(letters[:count])}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "</s>"])
    return raw


def write_letters(folder: Path) -> Path:
    """Makes a folder that of a model, as far as its tokenizer is concerned, and returns it."""
    raw_letters().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    return folder


LETTERS = Tokenizer(
    TokenizersVocabulary(raw_letters()), SpecialTokens(bos=BOS, eos=frozenset({EOS}), add_bos=True)
)


def ids_of(text: str) -> list[int]:
    """The text's ids, without bos."""
    return LETTERS.encode(text)[1:]


class Verbose(Tokenizer):
    """A tokenizer whose every token is a long text."""

    def __init__(self, text: str):
        super().__init__(TokenizersVocabulary(raw_letters()), SpecialTokens())
        self._text = text

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        return self._text * len(token_ids)
