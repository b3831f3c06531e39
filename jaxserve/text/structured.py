"""Structured output: a JSON schema, regular expression, grammar or choice as masks of tokens.

llguidance compiles what a client asks for into an automaton over the vocabulary; the engine asks a
`TokenGrammar` before each token which tokens are allowed. Clients are not trusted: the size of a
grammar, the work to compile it and the work per step are bounded, and exceeding a bound is an error
of that request alone. Compiling releases the GIL but takes long: never call it on an event loop.
Called by `grammars.py`; knows no requests.
"""

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np

from jaxserve.text.tokenizer import Tokenizer

MAX_CHARACTERS = 2**16
"""Of a schema, expression or grammar."""
KEPT = 64
"""Compiled grammars that are cached."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_items_in_row": 1000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Of llguidance: some milliseconds of work per step, tens per compilation."""

JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t\n]{0,20}"}
"""White space between JSON tokens is bounded: a model could write it for ever."""


class GrammarError(ValueError):
    """The grammar is invalid or takes too much work; the message is for the client."""


class TokenGrammar:
    """The state of a grammar in one text; implements the engine's `Grammar`. Never shared.

    Args:
      serialised: the grammar as llguidance's compiler takes it.
      matcher: llguidance's automaton, in its first state.
      words: uint32 words of a mask.
      token_bytes: token id → its bytes; called until `begins_after` has appeared.
      begins_after: the text is free up to these bytes, such as the end of the reasoning.
    """

    def __init__(
        self,
        serialised: str,
        matcher: llguidance.LLMatcher,
        words: int,
        token_bytes: Any,
        begins_after: bytes = b"",
    ):
        self.serialised = serialised
        self.begins_after = begins_after
        self._matcher = matcher
        self._words = words
        self._token_bytes = token_bytes
        self._tail = b""

    def copy(self) -> "TokenGrammar":
        """An independent copy in the same state."""
        matcher = self._matcher.deep_copy()
        copy = TokenGrammar(
            self.serialised, matcher, self._words, self._token_bytes, self.begins_after
        )
        copy._tail = self._tail
        return copy

    def after(self, begins_after: bytes) -> "TokenGrammar":
        """Sets `begins_after`; returns the grammar itself."""
        self.begins_after = begins_after
        return self

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return not self.begins_after and self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """The allowed tokens: uint32 `[ceil(vocab / 32)]`, bit t % 32 of word t // 32.

        Raises:
          GrammarError: computing it exceeded the work limit.
        """
        if self.begins_after:
            return np.full(self._words, 0xFFFFFFFF, np.uint32)
        mask = self._matcher.compute_bitmask()
        self._check()
        return np.frombuffer(mask, np.uint32)[: self._words]

    def accept(self, token_id: int) -> None:
        """Takes the next token.

        Raises:
          GrammarError: it is not allowed here.
        """
        if self.begins_after:
            self._tail = (self._tail + self._token_bytes(token_id))[-4096:]
            if self.begins_after in self._tail:
                self.begins_after = b""
            return
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))


class GrammarCompiler:
    """Compiles grammars for one model. Safe for threads.

    Args:
      tokenizer: the model's.
      vocab_size: of the model; may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._lock = threading.Lock()
        self._matcher = functools.lru_cache(KEPT)(self._compile)

    def json_schema(self, schema: Mapping[str, Any] | str) -> TokenGrammar:
        """Texts that are JSON and valid against a schema.

        Raises:
          GrammarError: the schema is invalid or too large.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _check_size(text)
        try:
            compiled = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        except ValueError as error:
            raise GrammarError(_first_line(str(error))) from None
        return self._grammar(compiled)

    def regex(self, expression: str) -> TokenGrammar:
        """Texts that a regular expression (Rust's) matches as a whole; raises GrammarError."""
        _check_size(expression)
        return self._grammar(llguidance.LLMatcher.grammar_from_regex(expression))

    def choice(self, texts: Sequence[str]) -> TokenGrammar:
        """One of some texts; raises GrammarError."""
        return self.lark("start: " + " | ".join(map(quoted, texts)))

    def lark(self, grammar: str) -> TokenGrammar:
        """Texts of a grammar in Lark's form, as llguidance reads it.

        Args:
          grammar: whose start symbol is `start`.

        Raises:
          GrammarError: the grammar is invalid or too large.
        """
        _check_size(grammar)
        return self._grammar(llguidance.LLMatcher.grammar_from_lark(grammar))

    def restored(self, serialised: str, begins_after: bytes) -> TokenGrammar:
        """The grammar, in its first state, of another process's `TokenGrammar`."""
        return self._grammar(serialised).after(begins_after)

    def _grammar(self, compiled: str) -> TokenGrammar:
        matcher = self._matcher(compiled).deep_copy()
        return TokenGrammar(compiled, matcher, self._words, self._tokenizer.token_bytes)

    def _compile(self, compiled: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(
            self._llguidance_tokenizer, compiled, limits=self._limits, log_level=0
        )
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        first = matcher.deep_copy()
        first.compute_bitmask()  # fails here rather than in the first step, and warms the copy up
        if first.is_error():
            raise GrammarError(_first_line(first.get_error()))
        return matcher

    @functools.cached_property
    def _llguidance_tokenizer(self) -> llguidance.LLTokenizer:
        with self._lock:
            wrapper = llguidance.TokenizerWrapper(_Tokens(self._tokenizer, self._vocab_size))
            return llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size)


class _Tokens:
    """A tokenizer with the interface that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_token_id
        # Without an end id, the text ends because nothing may follow.
        self.eos_token_id = min(tokenizer.eos_token_ids, default=vocab_size - 1)
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace"), add_bos=False)


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise GrammarError(f"{len(text)} characters, at most {MAX_CHARACTERS} are allowed")


def quoted(text: str) -> str:
    """A text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def _first_line(error: str) -> str:
    return error.strip().partition("\n")[0][:300] or "is not possible"
