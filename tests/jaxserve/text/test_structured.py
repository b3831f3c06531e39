"""Masks against what a text may be, and hostile grammars against the clock."""

import json
import time

import numpy as np
import pytest

from jaxserve.text.structured import GrammarCompiler, GrammarError, TokenGrammar
from tests.jaxserve.text.letters import EOS, LETTERS, ids_of

SECONDS = 10
"""No grammar takes longer, however hostile and however busy the machine."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(LETTERS, 300)


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


def test_a_choice(compiler: GrammarCompiler) -> None:
    grammar = compiler.choice(["red", "green", 'a"\n\\é'])
    assert sorted(allowed(grammar)) == ["a", "g", "r"]
    assert allowed(follow(grammar, "gr")) == "e"
    assert not grammar.finished
    follow(grammar, "een")
    assert grammar.finished
    assert follow(compiler.choice(["red", 'a"\n\\é']), 'a"\n\\é').finished


def test_a_regular_expression(compiler: GrammarCompiler) -> None:
    grammar = compiler.regex("[ab]{2,3}")
    assert sorted(allowed(grammar)) == ["a", "b"]
    assert sorted(allowed(follow(grammar, "ab"))) == ["$", "a", "b"]
    assert follow(grammar, "b").finished


def test_a_grammar(compiler: GrammarCompiler) -> None:
    grammar = compiler.lark('start: "(" start ")" | "x"')
    assert follow(grammar, "((x))").finished


def test_a_schema(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}},
        "required": ["n"],
        "additionalProperties": False,
    }
    grammar = follow(compiler.json_schema(schema), '{"n":')
    assert sorted(allowed(grammar).strip()) == sorted("345")
    assert follow(grammar, "4}").finished
    assert follow(compiler.json_schema(json.dumps(schema)), '{"n": 5}').finished


def test_white_space_ends(compiler: GrammarCompiler) -> None:
    grammar = follow(compiler.json_schema({"type": "object"}), "{" + " " * 20)
    assert " " not in allowed(grammar)


def test_a_token_that_may_not_come(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError):
        follow(compiler.choice(["red"]), "x")


def test_the_end_id_ends(compiler: GrammarCompiler) -> None:
    grammar = follow(compiler.regex("a+"), "a")
    grammar.accept(EOS)
    assert grammar.finished


def test_copies_go_their_own_ways(compiler: GrammarCompiler) -> None:
    grammar = compiler.choice(["red", "green"])
    copy = grammar.copy()
    follow(grammar, "r")
    assert sorted(allowed(copy)) == ["g", "r"]
    assert sorted(allowed(compiler.choice(["red", "green"]))) == ["g", "r"]  # nor the kept one


def test_it_may_begin_later(compiler: GrammarCompiler) -> None:
    grammar = compiler.choice(["red", "green"]).after(b"</think>")
    copy = follow(grammar.copy(), "no red </thin")
    assert len(allowed(copy)) > 250
    assert not copy.finished
    assert sorted(allowed(follow(copy, "k>"))) == ["g", "r"]
    assert len(allowed(grammar)) > 250


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "("),
        ("regex", "(?=x)"),
        ("regex", "x" * 70_000),
        ("json_schema", '{"type":'),
        ("json_schema", "[]"),
        ("json_schema", {"type": "nonsense"}),
        ("json_schema", {"$ref": "#/$defs/x"}),
        ("json_schema", {"$ref": "http://evil.example/x"}),
        ("json_schema", {"$ref": "file:///etc/passwd"}),
        ("json_schema", {"type": "string", "pattern": "("}),
        ("json_schema", '{"not":' * 5000 + "{}" + "}" * 5000),
        ("lark", "start: nowhere"),
        ("lark", ""),
        ("choice", ["x" * 70_000]),
    ],
)
def test_what_is_refused(compiler: GrammarCompiler, kind: str, source: object) -> None:
    start = time.monotonic()
    with pytest.raises(GrammarError) as caught:
        getattr(compiler, kind)(source)
    assert time.monotonic() - start < SECONDS
    assert 0 < len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "[ab]*a[ab]{300}"),
        ("regex", "(a{1000}){1000}"),
        ("regex", "(.*a){50}"),
        ("regex", "((a{0,100}){0,100}){0,100}"),
        ("regex", ".{1,60000}"),
        ("json_schema", {"anyOf": [{"type": "string", "maxLength": i} for i in range(1000)]}),
        ("json_schema", {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}),
        ("lark", 'start: start start | "a"'),
    ],
)
def test_hostile_ones_take_bounded_steps(
    compiler: GrammarCompiler, kind: str, source: object
) -> None:
    """Each step is quick, or ends that request."""
    start = time.monotonic()
    try:
        grammar = getattr(compiler, kind)(source)
        for _ in range(30):
            bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
            grammar.accept(int(np.flatnonzero(bits)[-1]))
            if grammar.finished:
                break
    except GrammarError:
        pass
    assert time.monotonic() - start < SECONDS
