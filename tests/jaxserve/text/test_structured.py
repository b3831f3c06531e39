"""Masks against what a text may be, and hostile grammars against the clock."""

import asyncio
import functools
import json
import threading
import time
from typing import Any

import numpy as np
import pytest

from jaxserve.config.special_tokens import SpecialTokens
from jaxserve.errors import InvalidRequestError
from jaxserve.server.structured_outputs import form
from jaxserve.text import structured
from jaxserve.text.structured import GrammarCompiler, GrammarError, TokenGrammar
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import TokenizersVocabulary
from tests import golden
from tests.jaxserve.text.letters import EOS, LETTERS, ids_of, raw_letters

SECONDS = 10
"""No grammar takes longer, however hostile and however busy the machine."""


COMPILER = GrammarCompiler(LETTERS, 300)


def compiled(kind: str, source: Any) -> TokenGrammar:
    return COMPILER.grammar(getattr(structured, kind)(source))


choice, regex, lark, json_schema = (
    functools.partial(compiled, kind) for kind in ("choice", "regex", "lark", "json_schema")
)


def allowed(grammar: TokenGrammar) -> str:
    """The letters that may come, and $ for the end."""
    mask = grammar.mask()
    assert mask.dtype == np.uint32
    assert mask.shape == (10,)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    ids = [int(token_id) for token_id in np.flatnonzero(bits)]
    return "".join("$" if token_id == EOS else LETTERS.decode([token_id]) for token_id in ids)


def follow(grammar: TokenGrammar, text: str) -> TokenGrammar:
    for token_id in ids_of(text):
        grammar.accept(token_id)
    return grammar


def test_what_may_come() -> None:
    """`golden/text/masks.txt` lists the form and source of grammars, and a text that has come."""

    def may_come(kind: str, source: Any, text: str) -> str:
        grammar = follow(compiled(kind, source), text)
        return "the end" if grammar.finished else "".join(sorted(allowed(grammar)))

    golden.check_values("text/masks.txt", may_come, {})


def test_a_grammar_is_restored() -> None:
    grammar = follow(lark('start: "(" start ")" | "x"'), "(x")
    assert allowed(COMPILER.restored(grammar.serialised, b"")) == "(x"


def test_a_token_that_may_not_come() -> None:
    with pytest.raises(GrammarError):
        follow(choice(["red"]), "x")


@pytest.mark.parametrize("end", [EOS, 5])
def test_any_end_id_ends(end: int) -> None:
    """Models name several; which one they write depends on their training."""
    tokenizer = Tokenizer(
        TokenizersVocabulary(raw_letters()), SpecialTokens(eos=frozenset({5, EOS}))
    )
    grammar = follow(GrammarCompiler(tokenizer, 300).grammar(structured.regex("a+")), "a")
    assert grammar.mask()[0] >> end & 1
    assert not grammar.finished
    grammar.accept(end)
    assert grammar.finished


def test_copies_go_their_own_ways() -> None:
    grammar = choice(["red", "green"])
    copy = grammar.copy()
    follow(grammar, "r")
    assert sorted(allowed(copy)) == ["g", "r"]
    assert sorted(allowed(choice(["red", "green"]))) == ["g", "r"]  # nor the kept one


def test_it_may_begin_later() -> None:
    grammar = choice(["red", "green"]).after(b"</think>")
    copy = follow(grammar.copy(), "no red </thin")
    assert len(allowed(copy)) > 250
    assert not copy.finished
    assert sorted(allowed(follow(copy, "k>"))) == ["g", "r"]
    assert len(allowed(grammar)) > 250


def chained(count: int) -> str:
    """Rules that each refer to the next one."""
    rules = [f'r{i}: "x" | r{i + 1}' for i in range(count - 2)]
    return "\n".join(["start: r0", *rules, f'r{count - 2}: "y"'])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_what_is_refused() -> None:
    """`golden/text/wrong_grammars.txt` lists the form and source of grammars."""
    start = time.monotonic()
    golden.check_arguments("text/wrong_grammars.txt", GrammarError, compiled, globals())
    assert time.monotonic() - start < 8 * SECONDS


def test_brackets_in_texts_do_not_nest() -> None:
    assert follow(json_schema(json.dumps({"const": "[" * 200})), '"' + "[" * 200 + '"').finished
    assert allowed(json_schema(nested(40)))


PRIMES = "start: T\nT: " + " & ".join(
    f"/([ab]{{{n}}})*a?/" for n in (7, 11, 13, 17, 19, 23, 29, 31)
)
"""llguidance looks for a text that all of these match, for a minute and in gigabytes."""


def test_others_do_not_wait_for_a_grammar_that_takes_too_long(monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.text.structured.COMPILE_SECONDS", 90.0)  # on a busy machine

    async def scenario() -> None:
        good, bad = form({"choice": ["red", "green"]}), form({"grammar": PRIMES})
        await grammars.compiled(*good)
        slow = asyncio.create_task(grammars.compiled(*bad))
        await asyncio.sleep(0)  # begins to compile
        assert sorted(allowed(await grammars.compiled(*good))) == ["g", "r"]
        assert not slow.done()
        with pytest.raises(InvalidRequestError, match=r"grammar: it took more than 2 s$"):
            await slow
        assert sorted(allowed(await grammars.compiled(*form({"regex": "a"})))) == ["a"]

    grammars = GrammarCompiler(LETTERS, 300)
    asyncio.run(scenario())
    grammars.close()


def test_grammars_are_compiled_one_at_a_time() -> None:
    threads = set()

    def slow(_: object) -> None:
        threads.add(threading.get_ident())
        time.sleep(0.05)

    async def scenario() -> None:
        await asyncio.gather(*(grammars.compiled("regex", lambda: "a") for _ in range(2)))

    grammars: Any = GrammarCompiler(LETTERS, 300)
    grammars.kept, grammars.grammar = lambda _: None, slow
    asyncio.run(scenario())
    grammars.close()
    assert len(threads) == 1


def test_as_many_grammars_are_kept_as_there_is_room_for() -> None:
    compiler = GrammarCompiler(LETTERS, 300)
    sources = [structured.regex(f"a{{{n}}}") for n in range(1, structured.KEPT + 2)]
    for source in sources:
        compiler.grammar(source)
        assert compiler.kept(sources[0]) is not None  # used now and then, so not the first to go
    assert [compiler.kept(source) is None for source in sources] == [False, True, *[False] * 63]


@golden.table("text/hostile_grammars.yaml")
def test_hostile_ones_take_bounded_steps(kind: str, source: object) -> None:
    """Each step is quick, or ends that request."""
    start = time.monotonic()
    try:
        grammar = compiled(kind, source)
        for _ in range(30):
            bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
            grammar.accept(int(np.flatnonzero(bits)[-1]))
            if grammar.finished:
                break
    except GrammarError:
        pass
    assert time.monotonic() - start < SECONDS
