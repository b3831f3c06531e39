"""Structured output: a JSON schema, regular expression, grammar or choice as masks of tokens.

llguidance compiles a grammar into an automaton over the vocabulary. The engine asks a
`TokenGrammar` before each token which tokens are allowed. Clients are not trusted. The size of a
grammar, the work to compile it and the work per step are bounded, and exceeding a bound is an error
of that request alone. llguidance's limits bound the work per step, but neither the time nor the
stack nor the memory that compiling takes. So each grammar is compiled in a process that may die of
it (`grammar_worker.py`), and compiled again here only when it survived there with less stack.

Compiling releases the GIL but takes long: never call it on an event loop. Called by `grammars.py`;
knows no requests.
"""

import dataclasses
import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance
import msgspec
import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.text import grammar_worker
from jaxserve.text.limited_process import LimitError, the_process
from jaxserve.text.no_vocabulary import MISSING
from jaxserve.text.tokenizer import Tokenizer

MAX_CHARACTERS = 2**16
"""Of a schema, expression or grammar."""
MAX_RULES = 1000
"""Rules and terminals of a grammar."""
MAX_DEPTH = 128
"""Objects and arrays around a part of a schema; llguidance reads no more."""
RULE = re.compile(r"^[ \t!?]*[A-Za-z_][^:\n]*:", re.MULTILINE)
"""Begins a rule or terminal in Lark's form."""
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
    rules: TokenRules = NO_RULES


@dataclasses.dataclass(eq=False)
class TokenGrammar:
    """The state of a grammar in one text; implements the engine's `Grammar`. Never shared.

    Attributes:
      source: the grammar as llguidance's compiler takes it; empty: any text.
      matcher: llguidance's automaton; None: any text.
      words: uint32 words of a mask.
      token_bytes: token id → its bytes; called until `begins_after` has appeared.
      begins_after: the text is free up to these bytes, such as the end of the reasoning.
      rules: hold for the whole text.
      tokens: of the text so far, where there are rules.
      thinking: whether the reasoning has not ended.
    """

    source: str
    matcher: llguidance.LLMatcher | None
    words: int
    token_bytes: Callable[[int], bytes]
    begins_after: bytes = b""
    rules: TokenRules = NO_RULES
    tokens: list[int] = dataclasses.field(default_factory=list)
    thinking: bool = True
    _tail: bytes = b""

    @property
    def serialised(self) -> str:
        """The grammar in its first state, for another process's `GrammarCompiler.restored`."""
        if self.rules == NO_RULES:
            return self.source
        return RULED + msgspec.json.encode(_Serialised(self.source, self.rules)).decode()

    def copy(self) -> "TokenGrammar":
        """An independent copy in the same state."""
        matcher = None if self.matcher is None else self.matcher.deep_copy()
        return dataclasses.replace(self, matcher=matcher, tokens=list(self.tokens))

    def after(self, begins_after: bytes) -> "TokenGrammar":
        """Sets `begins_after`; returns the grammar itself."""
        self.begins_after = begins_after
        return self

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return not self.begins_after and self.matcher is not None and self.matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """The allowed tokens: uint32 `[ceil(vocab / 32)]`, bit t % 32 of word t // 32.

        Raises:
          GrammarError: computing it exceeded the work limit.
        """
        if self.begins_after or self.matcher is None:
            mask = np.full(self.words, 0xFFFFFFFF, np.uint32)
        else:
            found = self.matcher.compute_bitmask()
            self._check(self.matcher)
            mask = np.frombuffer(found, np.uint32)[: self.words]
        return self.rules.masked(mask, self.tokens, self.thinking)

    def accept(self, token_id: int) -> None:
        """Takes the next token.

        Raises:
          GrammarError: it is not allowed here.
        """
        if self.rules != NO_RULES:
            self.tokens.append(token_id)
            ending = self.rules.ending
            self.thinking &= not ending or tuple(self.tokens[-len(ending) :]) != ending
        if self.begins_after:
            self._tail = (self._tail + self.token_bytes(token_id))[-4096:]
            if self.begins_after in self._tail:
                self.begins_after = b""
        elif self.matcher is not None:
            self.matcher.consume_token(token_id)
            self._check(self.matcher)

    def _check(self, matcher: llguidance.LLMatcher) -> None:
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))


def json_schema(schema: Mapping[str, Any] | str) -> str:
    """Texts that are JSON and valid against a schema, as a grammar for `GrammarCompiler`.

    Raises:
      GrammarError: the schema is not JSON, or too large.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except RecursionError:
        raise GrammarError(f"is nested more than {MAX_DEPTH} deep") from None
    _check_size(text)
    _check_depth(text)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
    except ValueError as error:
        raise GrammarError(_first_line(str(error))) from None


def regex(expression: str) -> str:
    """Texts that a regular expression (Rust's) matches as a whole; raises GrammarError."""
    _check_size(expression)
    return llguidance.LLMatcher.grammar_from_regex(expression)


def choice(texts: Sequence[str]) -> str:
    """One of some texts; raises GrammarError."""
    return lark("start: " + " | ".join(map(quoted, texts)))


def lark(grammar: str) -> str:
    """Texts of a grammar in Lark's form, as llguidance reads it.

    Args:
      grammar: whose start symbol is `start`.

    Raises:
      GrammarError: the grammar is too large.
    """
    _check_size(grammar)
    rules = len(RULE.findall(grammar))
    if rules > MAX_RULES:
        raise GrammarError(f"{rules} rules, at most {MAX_RULES} are allowed")
    return llguidance.LLMatcher.grammar_from_lark(grammar)


def structural_tags(tags: Sequence[llguidance.StructTag]) -> str:
    """Free text in which certain marks begin a part with a grammar; raises GrammarError."""
    try:
        compiled = llguidance.StructTag.to_grammar(list(tags), assume_special=False)
    except (ValueError, AssertionError, RecursionError) as error:
        raise GrammarError(_first_line(str(error))) from None
    return lark(compiled)


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
        self._lock = threading.Lock()
        self._kept: dict[str, TokenGrammar] = {}

    def kept(self, compiled: str) -> TokenGrammar | None:
        """The grammar in its first state, where it has been compiled lately; otherwise None."""
        with self._lock:
            grammar = self._kept.pop(compiled, None)
            if grammar is None:
                return None
            self._kept[compiled] = grammar  # now the last one to go
        return grammar.copy()

    def grammar(self, compiled: str) -> TokenGrammar:
        """A grammar in its first state; slow where it is not kept.

        Args:
          compiled: from `json_schema`, `regex`, `choice`, `lark` or `structural_tags`.

        Raises:
          GrammarError: the grammar is invalid, or compiling it exceeded a limit.
        """
        if (kept := self.kept(compiled)) is not None:
            return kept
        grammar = self._compile(compiled)
        with self._lock:
            self._kept[compiled] = grammar
            if len(self._kept) > KEPT:
                self._kept.pop(next(iter(self._kept)))
        return grammar.copy()

    def ruled(self, grammar: TokenGrammar | None, rules: TokenRules) -> TokenGrammar:
        """A grammar, or none, with rules for single tokens."""
        free = TokenGrammar("", None, self._words, self._tokenizer.token_bytes)
        return dataclasses.replace(grammar or free, rules=rules)

    def restored(self, serialised: str, begins_after: bytes) -> TokenGrammar:
        """The grammar, in its first state, of another process's `TokenGrammar`.

        Raises:
          InvalidRequestError: compiling it exceeded a limit.
        """
        found = _Serialised(serialised)
        if serialised.startswith(RULED):
            found = msgspec.json.decode(serialised.removeprefix(RULED), type=_Serialised)
        try:
            grammar = self.grammar(found.grammar) if found.grammar else None
        except GrammarError as error:
            raise InvalidRequestError("grammar", str(error)) from None
        return self.ruled(grammar, found.rules).after(begins_after)

    def _compile(self, compiled: str) -> TokenGrammar:
        if not self._tokenizer.knows_text:
            raise GrammarError(MISSING)
        try:
            request = {"grammar": compiled, "limits": LIMITS, **self._tokens.special()}
            problem = the_process(grammar_worker, "requests").ask(request)["error"]
        except LimitError as error:
            problem = str(error)
        if problem:
            raise GrammarError(_first_line(problem))
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(
            self._llguidance_tokenizer, compiled, limits=limits, log_level=0
        )
        grammar = TokenGrammar(compiled, matcher, self._words, self._tokenizer.token_bytes)
        grammar.mask()  # fails here rather than in the first step, and warms copies up
        return grammar

    @functools.cached_property
    def _tokens(self) -> "_Tokens":
        return _Tokens(self._tokenizer, self._vocab_size)

    @functools.cached_property
    def _llguidance_tokenizer(self) -> llguidance.LLTokenizer:
        wrapper = llguidance.TokenizerWrapper(self._tokens)
        ends = sorted(self._tokenizer.eos_token_ids) or None
        return llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=ends)


class _Tokens:
    """A tokenizer with the interface that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_token_id
        # Without an end id, the text ends because nothing may follow.
        self.eos_token_id = min(tokenizer.eos_token_ids, default=vocab_size - 1)
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]

    def special(self) -> dict[str, Any]:
        """The arguments of `grammar_worker.py` that describe the vocabulary."""
        names = [
            (number, self.tokens[number].decode("latin-1")) for number in self.special_token_ids
        ]
        return {"vocab_size": len(self.tokens), "eos": self.eos_token_id, "special": names}

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace"), add_bos=False)


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise GrammarError(f"{len(text)} characters, at most {MAX_CHARACTERS} are allowed")


def _check_depth(text: str) -> None:
    """Raises GrammarError where JSON is nested too deeply."""
    depth = deepest = 0
    inside_text = False
    for mark in re.findall(r'\\.|[]["{}]', text):
        if mark == '"':
            inside_text = not inside_text
        elif len(mark) == 1 and not inside_text:
            depth += 1 if mark in "[{" else -1
            deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise GrammarError(f"is nested {deepest} deep, at most {MAX_DEPTH} is allowed")


def quoted(text: str) -> str:
    """A text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def _first_line(error: str) -> str:
    return error.strip().partition("\n")[0][:300] or "is not possible"
