"""Tries out whether llguidance can compile a grammar, in a process that may die of it.

Run by `limited_worker.py`. The vocabulary has the model's special tokens and one token a byte: it
is built quickly in each new process, and the work that kills is done before the vocabulary matters.

A request has `grammar`, as llguidance's compiler takes it or in EBNF, and the other arguments of
`_tokenizer` and of `llguidance.LLParserLimits`. The answer has `error`, empty where the grammar is
fine, and the `grammar` for the compiler.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

EBNF = re.compile(r"(?:\s|#.*\n)*+[A-Za-z_][\w-]*\s*::=")
"""Beginning of a grammar in the form of llama.cpp, XGrammar and SGLang."""


class _ByteTokens:
    """A tokenizer with the interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, vocab_size: int, eos: int, special: dict[int, str]):
        self.eos_token_id = eos
        self.special_token_ids = sorted(special)
        names = [special.get(number, "").encode("latin-1") for number in range(vocab_size)]
        self.tokens = [*names, *(bytes([byte]) for byte in range(256))]
        self._bytes = vocab_size

    def __call__(self, text: bytes) -> list[int]:
        return [self._bytes + byte for byte in text]


@functools.lru_cache(1)
def _tokenizer(
    vocab_size: int, eos: int, special: tuple[tuple[int, str], ...]
) -> llguidance.LLTokenizer:
    tokens = _ByteTokens(vocab_size, eos, dict(special))
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokens), n_vocab=len(tokens.tokens))


def answer(request: Mapping[str, Any]) -> dict[str, str]:
    """Compiles the grammar and computes its first mask."""
    special = tuple((number, name) for number, name in request["special"])
    tokenizer = _tokenizer(request["vocab_size"], request["eos"], special)
    limits, grammar = llguidance.LLParserLimits(**request["limits"]), request["grammar"]
    if EBNF.match(grammar):
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # the converter has no common type of errors
            return {"error": str(error)}
    matcher = llguidance.LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return {"error": matcher.get_error(), "grammar": grammar}
