"""Structured output: a JSON schema, regular expression, grammar or choice as masks of tokens.

llguidance compiles a grammar into an automaton over the vocabulary. The engine asks a
`TokenGrammar` before each token which tokens are allowed. Clients are not trusted. The size of a
grammar, the work to compile it and the work per step are bounded, and exceeding a bound is an error
of that request alone. llguidance's limits bound the work per step, but not the time, stack or
memory of compiling. So each grammar is first compiled in a process that may crash
(`grammar_worker.py`), with a smaller stack, and compiled here only if that succeeded.

Compiling releases the GIL but takes up to tens of milliseconds: event loops await
`GrammarCompiler.compiled`. Called by the faces' handlers and by workers; does not know requests.
"""

import asyncio
import dataclasses
import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import msgspec
import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.text import grammar_worker
from jaxserve.text.limited_process import LimitError, the_process
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import MISSING

MAX_CHARACTERS = 2**16
"""Most characters of a schema, expression or grammar."""
MAX_RULES = 1000
"""Most rules and terminals of a grammar."""
MAX_DEPTH = 128
"""Deepest nesting of objects and arrays in a schema; llguidance refuses more."""
RULE = re.compile(r"^[ \t!?]*[A-Za-z_][^:\n]*:", re.MULTILINE)
"""Beginning of a rule or terminal in Lark's form."""
KEPT = 64
"""Number of compiled grammars that are cached."""
COMPILE_SECONDS = 10.0
"""How long compiling a grammar may take, including the wait for those before it."""

Form = Callable[[], str]
"""Makes a grammar for `GrammarCompiler`; raises GrammarError."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_items_in_row": 1000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""llguidance's limits: a few milliseconds of work per step, tens per compilation."""

JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t\n]{0,20}"}
"""Bounds the white space between JSON tokens: a model could write it forever."""


class GrammarError(ValueError):
    """The grammar is invalid or takes too much work; the message is for the client."""


class TokenRules(msgspec.Struct, frozen=True):
    """A request's rules for single tokens.

    Attributes:
      allowed: the only tokens that may be generated; empty: all.
      banned: token sequences that must not appear as a whole.
      budget: most tokens of reasoning, after which `ending` is forced; -1: unlimited.
      beginning: tokens that begin the reasoning; empty: the prompt has begun it.
      ending: tokens that end the reasoning.
    """

    allowed: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    budget: int = -1
    beginning: tuple[int, ...] = ()
    ending: tuple[int, ...] = ()

    def masked(self, mask: np.ndarray, tokens: Sequence[int], thinking: bool) -> np.ndarray:
        """The mask without the tokens that the rules exclude.

        Args:
          mask: uint32 words, as from `TokenGrammar.mask`.
          tokens: token ids generated so far.
          thinking: True until the reasoning has ended.
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
    """A mask of `words` words that allows only these tokens."""
    mask = np.zeros(words, np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask


NO_RULES = TokenRules()


class _Serialised(msgspec.Struct):
    """A grammar with rules, as sent to other processes."""

    grammar: str
    rules: TokenRules


@dataclasses.dataclass(eq=False)
class TokenGrammar:
    """State of a grammar in one generated text; implements the engine's `Grammar`. Never shared.

    Attributes:
      source: the grammar in llguidance's form; empty: any text.
      matcher: llguidance's automaton; None: any text.
      words: number of uint32 words in a mask.
      token_bytes: maps a token id to its bytes; called until `begins_after` has appeared.
      begins_after: the text is free up to these bytes, such as the end of the reasoning.
      rules: rules for single tokens, valid for the whole text.
      tokens: token ids so far; recorded only if `rules` are set.
      thinking: True until the reasoning has ended.
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
        return msgspec.json.encode(_Serialised(self.source, self.rules)).decode()

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
          GrammarError: the token is not allowed here.
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
            error = _first_line(matcher.get_error())
            raise GrammarError("allows no further text" if error == "NoExtensionBias" else error)


def json_schema(schema: Mapping[str, Any] | str) -> str:
    """Returns the grammar of JSON texts that are valid against a schema, for `GrammarCompiler`.

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
    """Returns the grammar of texts that a (Rust) regex matches as a whole; raises GrammarError."""
    _check_size(expression)
    return llguidance.LLMatcher.grammar_from_regex(expression)


def choice(texts: Sequence[str]) -> str:
    """Returns the grammar that allows exactly these texts; raises GrammarError."""
    return lark("start: " + " | ".join(map(quoted, texts)))


def lark(grammar: str) -> str:
    """Converts a grammar in llguidance's Lark form, or in EBNF, for `GrammarCompiler`.

    Args:
      grammar: a Lark grammar with the start symbol `start`, or EBNF (`root ::= …`).

    Raises:
      GrammarError: the grammar is too large.
    """
    _check_size(grammar)
    rules = len(RULE.findall(grammar))
    if rules > MAX_RULES:
        raise GrammarError(f"{rules} rules, at most {MAX_RULES} are allowed")
    return llguidance.LLMatcher.grammar_from_lark(grammar)


def structural_tags(tags: Sequence[llguidance.StructTag]) -> str:
    """Grammar of free text in which marks begin parts with own grammars; raises GrammarError."""
    try:
        compiled = llguidance.StructTag.to_grammar(list(tags), assume_special=False)
    except (ValueError, AssertionError, RecursionError) as error:
        raise GrammarError(_first_line(str(error))) from None
    return lark(compiled)


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe.

    A client may send a grammar made to take long. `compiled` therefore compiles one at a time, on a
    thread that starts with the first one, and within a deadline; cached grammars do not wait.

    Args:
      tokenizer: the model's tokenizer.
      vocab_size: vocabulary size of the model; may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        self._kept: dict[str, TokenGrammar] = {}
        self._thread = ThreadPoolExecutor(1, "grammars")

    async def compiled(self, field: str, form: Form) -> TokenGrammar:
        """Compiles a grammar for one request.

        Raises:
          InvalidRequestError: it is invalid, or was not compiled in time; names the field.
        """
        loop = asyncio.get_running_loop()
        try:
            asked = form()
            if (kept := self.kept(asked)) is not None:
                return kept
            async with asyncio.timeout(COMPILE_SECONDS):
                return await loop.run_in_executor(self._thread, self.grammar, asked)
        except GrammarError as error:
            raise InvalidRequestError(field, str(error)) from None
        except TimeoutError:
            message = f"was not compiled within {COMPILE_SECONDS:g} s"
            raise InvalidRequestError(field, message) from None

    def close(self) -> None:
        """Stops the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def kept(self, compiled: str) -> TokenGrammar | None:
        """The grammar in its first state if it is cached, else None."""
        with self._lock:
            grammar = self._kept.pop(compiled, None)
            if grammar is None:
                return None
            self._kept[compiled] = grammar  # now the last one to go
        return grammar.copy()

    def grammar(self, compiled: str) -> TokenGrammar:
        """Returns a grammar in its first state; slow if it is not cached.

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
        """Adds rules for single tokens to a grammar; None: to any text."""
        free = TokenGrammar("", None, self._words, self._tokenizer.token_bytes)
        return dataclasses.replace(grammar or free, rules=rules)

    def restored(self, serialised: str, begins_after: bytes) -> TokenGrammar:
        """Restores another process's `TokenGrammar` in its first state, from `serialised`.

        Raises:
          InvalidRequestError: compiling it exceeded a limit.
        """
        found = msgspec.json.decode(serialised, type=_Serialised)
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
            found = the_process(grammar_worker, "requests").ask(request)
        except LimitError as error:
            found = {"error": str(error)}
        if found["error"]:
            raise GrammarError(_first_line(found["error"]))
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(
            self._llguidance_tokenizer, found["grammar"], limits=limits, log_level=0
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
    """Raises GrammarError if JSON is nested too deeply."""
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
