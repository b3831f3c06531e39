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
import msgspec
import numpy as np

from jaxserve.text.no_vocabulary import MISSING
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


RULED = "rules:"
"""Begins what other processes get of a grammar with rules."""


class GrammarError(ValueError):
    """The grammar is invalid or takes too much work; the message is for the client."""


class TokenRules(msgspec.Struct, frozen=True):
    """What a request says of single tokens.

    Attributes:
      allowed: the only tokens that may come; empty: all.
      banned: sequences that must not come whole.
      budget: tokens of the reasoning, after which `ending` is written; -1: any number.
      beginning: begins the reasoning; empty: the prompt has begun it.
      ending: ends the reasoning.
    """

    allowed: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    budget: int = -1
    beginning: tuple[int, ...] = ()
    ending: tuple[int, ...] = ()

    def masked(self, mask: np.ndarray, tokens: Sequence[int], thinking: bool) -> np.ndarray:
        """The mask without the tokens that the rules exclude.

        Args:
          mask: uint32 words, as of `TokenGrammar.mask`.
          tokens: that the text has so far.
          thinking: whether its reasoning has not ended, if it has one.
        """
        place = len(tokens) - len(self.beginning) - self.budget
        begun = tuple(tokens[: len(self.beginning)]) == self.beginning
        if thinking and begun and self.budget >= 0 and 0 <= place < len(self.ending):
            return _only(self.ending[place : place + 1], len(mask))
        if self.allowed:
            mask = mask & _only(self.allowed, len(mask))
        out = [
            last
            for *before, last in self.banned
            if not before or list(tokens[-len(before) :]) == before
        ]
        return mask & ~_only(out, len(mask)) if out else mask


def _only(token_ids: Sequence[int], words: int) -> np.ndarray:
    """A mask of some tokens."""
    mask = np.zeros(words, np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask


NO_RULES = TokenRules()


class _Serialised(msgspec.Struct):
    """A grammar with rules, between processes."""

    grammar: str
    rules: TokenRules


class TokenGrammar:
    """The state of a grammar in one text; implements the engine's `Grammar`. Never shared.

    Args:
      serialised: the grammar as llguidance's compiler takes it.
      matcher: llguidance's automaton, in its first state; None: any text.
      words: uint32 words of a mask.
      token_bytes: token id → its bytes; called until `begins_after` has appeared.
      begins_after: the text is free up to these bytes, such as the end of the reasoning.
      rules: hold for the whole text.
    """

    def __init__(
        self,
        serialised: str,
        matcher: llguidance.LLMatcher | None,
        words: int,
        token_bytes: Any,
        begins_after: bytes = b"",
        rules: TokenRules = NO_RULES,
    ):
        self.serialised = serialised
        self.rules = rules
        self._tokens: list[int] = []  # where there are rules
        self._thinking = True
        self.begins_after = begins_after
        self._matcher = matcher
        self._words = words
        self._token_bytes = token_bytes
        self._tail = b""

    def copy(self) -> "TokenGrammar":
        """An independent copy in the same state."""
        matcher = None if self._matcher is None else self._matcher.deep_copy()
        copy = TokenGrammar(
            self.serialised, matcher, self._words, self._token_bytes, self.begins_after, self.rules
        )
        copy._tail, copy._tokens = self._tail, list(self._tokens)
        copy._thinking = self._thinking
        return copy

    def after(self, begins_after: bytes) -> "TokenGrammar":
        """Sets `begins_after`; returns the grammar itself."""
        self.begins_after = begins_after
        return self

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return not self.begins_after and self._matcher is not None and self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """The allowed tokens: uint32 `[ceil(vocab / 32)]`, bit t % 32 of word t // 32.

        Raises:
          GrammarError: computing it exceeded the work limit.
        """
        if self.begins_after or self._matcher is None:
            mask = np.full(self._words, 0xFFFFFFFF, np.uint32)
        else:
            found = self._matcher.compute_bitmask()
            self._check(self._matcher)
            mask = np.frombuffer(found, np.uint32)[: self._words]
        if self.rules == NO_RULES:
            return mask
        return self.rules.masked(mask, self._tokens, self._thinking)

    def accept(self, token_id: int) -> None:
        """Takes the next token.

        Raises:
          GrammarError: it is not allowed here.
        """
        if self.rules != NO_RULES:
            self._tokens.append(token_id)
            ending = self.rules.ending
            self._thinking &= not ending or tuple(self._tokens[-len(ending) :]) != ending
        if self.begins_after:
            self._tail = (self._tail + self._token_bytes(token_id))[-4096:]
            if self.begins_after in self._tail:
                self.begins_after = b""
            return
        if self._matcher is not None:
            self._matcher.consume_token(token_id)
            self._check(self._matcher)

    def _check(self, matcher: llguidance.LLMatcher) -> None:
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))


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

    def structural_tags(self, tags: Sequence[llguidance.StructTag]) -> TokenGrammar:
        """Free text in which certain marks begin a part with a grammar; raises GrammarError."""
        try:
            compiled = llguidance.StructTag.to_grammar(list(tags), assume_special=False)
        except (ValueError, AssertionError) as error:
            raise GrammarError(_first_line(str(error))) from None
        return self.lark(compiled)

    def ruled(self, grammar: TokenGrammar | None, rules: TokenRules) -> TokenGrammar:
        """A grammar, or none, with rules for single tokens."""
        plain = "" if grammar is None else grammar.serialised
        matcher = None if grammar is None else grammar._matcher
        serialised = msgspec.json.encode(_Serialised(plain, rules)).decode()
        begins_after = b"" if grammar is None else grammar.begins_after
        token_bytes = self._tokenizer.token_bytes
        return TokenGrammar(
            RULED + serialised, matcher, self._words, token_bytes, begins_after, rules
        )

    def restored(self, serialised: str, begins_after: bytes) -> TokenGrammar:
        """The grammar, in its first state, of another process's `TokenGrammar`."""
        if not serialised.startswith(RULED):
            return self._grammar(serialised).after(begins_after)
        found = msgspec.json.decode(serialised.removeprefix(RULED), type=_Serialised)
        grammar = self._grammar(found.grammar) if found.grammar else None
        return self.ruled(grammar, found.rules).after(begins_after)

    def _grammar(self, compiled: str) -> TokenGrammar:
        matcher = self._matcher(compiled).deep_copy()
        return TokenGrammar(compiled, matcher, self._words, self._tokenizer.token_bytes)

    def _compile(self, compiled: str) -> llguidance.LLMatcher:
        if not self._tokenizer.knows_text:
            raise GrammarError(MISSING)
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
