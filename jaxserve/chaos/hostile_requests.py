"""Draws grammars, schemas, chats, bodies and messages that are made to end or to stall a server.

Called by `hostile.py`, which sends them.
"""

import json
import math
from random import Random
from typing import Any

from jaxserve.server import jaxserve_pb2 as pb


def grammar(rng: Random) -> tuple[str, Any]:
    """Draws a form of `structured_outputs`, and its value."""
    count = rng.choice([3, 30, 300, 900, 1500, 3000])
    letters = "abc(){}[]|*+?.\\^$:\"'/~&-,0129pLN \n"
    garbage = "".join(rng.choice(letters) for _ in range(count))
    chain = [f'r{n}: "x{n}" | r{n + 1}' for n in range(count)]
    terminals = [f'T{n}: T{n + 1} | "k{n}" T{n + 1}' for n in range(count)]
    primes = rng.sample((7, 11, 13, 17, 19, 23, 29, 31), rng.randint(2, 8))
    nullable = [f'r{n}: "a"? | r{(n * 7 + 1) % count}' for n in range(count)]
    depth = count // 3
    larks = [
        "\n".join(["start: r0", *chain, f'r{count}: "y"']),
        "\n".join(["start: T0", *terminals, f'T{count}: "y"']),
        "start: T\nT: " + " & ".join(f"/([ab]{{{prime}}})*a?/" for prime in primes),
        "\n".join(["start: " + " ".join(f"r{n}" for n in range(count)), *nullable]),
        'start: start start start | "a" | ""',
        'start: e\ne: e "+" e | e "*" e | e e | /[a-z0-9]/ | ""',
        "start: " + "(" * depth + '"a"' + ")?" * depth,
        f'start: ("a" | "b" x){{1,{count * 20}}}\nx: "c"{{3,{count * 20}}}',
        "start: (" + " | ".join(f"/[a-z]*{n}[a-z]*/" for n in range(depth)) + ")*",
        "start: %json " + '{"items":' * depth + "{}" + "}" * depth,
        "start: " + garbage,
        garbage,
    ]
    regexes = [
        f"a{{1,{10 ** rng.randint(1, 9)}}}",
        f"(a{{{count}}}){{{count}}}",
        f"((a{{0,{depth}}}){{0,{depth}}}){{0,{depth}}}",
        f"\\p{{L}}{{1,{count}}}",
        f"[ab]*a[ab]{{{count}}}",
        "|".join(f"(.*{letter}.*){{{rng.randint(1, 60)}}}" for letter in "abcdef"),
        "[^\\p{L}]*" * count,
        "(?i)" + "(\\w+\\s)*" * depth,
        "(" * count,
        garbage,
    ]
    choices = [[garbage[:50] + str(n) for n in range(min(count, 1100))], ["x" * 66_000], [""], []]
    return rng.choice(
        [
            ("grammar", rng.choice(larks)),
            ("grammar", rng.choice(larks)),
            ("regex", rng.choice(regexes)),
            ("choice", rng.choice(choices)),
        ]
    )


def schema(rng: Random) -> str:
    """The text of a JSON schema."""
    count = rng.choice([2, 20, 120, 128, 129, 700, 5000])
    few = count % 300
    cycle: dict[str, Any] = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    product: list[Any] = [
        {"anyOf": [{"properties": {f"p{n}_{k}": {}}} for k in range(3)]} for n in range(9)
    ]
    texts = ["(" * count, "^(a?){3000}(b|.*d){20}$", f".*a.{{{count}}}", "\\p{L}{1,100}"]
    kinds: list[Any] = [
        {"enum": [f"value {n}" for n in range(count)]},
        {"enum": list(range(count))},
        {"anyOf": [{"type": "string", "maxLength": n} for n in range(few)]},
        {"type": "integer", "multipleOf": rng.choice([7, 99_999_989])},
        {"type": "string", "pattern": rng.choice(texts)},
        {"type": "string", "minLength": count * 10, "maxLength": 10**9},
        {"type": "array", "items": {"type": "integer"}, "minItems": count, "maxItems": 10**9},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(few)}},
        {"patternProperties": {f"^[a-z]*{n}[a-z]*$": {} for n in range(few)}},
        {"allOf": product[: rng.randint(1, 9)]},
        {"properties": {"k" * count * 5: {"type": "integer"}}},
        {"type": rng.choice(["nonsense", [], 3, None])},
        {"$ref": rng.choice(["#", "#/$defs/x", "http://127.0.0.1:1/x", "file:///etc/passwd"])},
        {"not": {"const": count}},
        cycle,
        rng.choice([[], 3, None, "x", True]),
    ]
    around = rng.choice(['{"items":', '{"anyOf":[', '{"properties":{"a":', "[", '{"not":'])
    closing = {"{": "}", "[": "]"}
    ends = "".join(closing[mark] for mark in reversed(around) if mark in closing)
    nested = around * count + "{}" + ends * count
    return rng.choice([nested, *(json.dumps(kind) for kind in kinds)])


def chat(rng: Random) -> dict[str, Any]:
    """The fields of a chat request whose template, messages, tools or switches are hostile."""
    count = rng.choice([3, 60, 64, 65, 900])
    loops = "{% for a in range(99999) %}"
    templates = [
        loops * 3 + "x" + "{% endfor %}" * 3,
        "{{ 'a' * 10 ** 12 }}",
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x * 2 %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * count + "1" + ")" * count + " }}",
        "{% if x %}" * count,
        "{{ messages.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{% include '/etc/passwd' %}",
        "".join(rng.choice("{}%#-+'\"\\ \nx.split(),[]|") for _ in range(count)),
        "{{ messages[0].content }}",
    ]
    nested: Any = {}
    for _ in range(count):
        nested = {"items": nested}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    hi = {"role": "user", "content": "hi"}
    return rng.choice(
        [
            *({"chat_template": template, "messages": [hi]} for template in templates),
            {"messages": [hi], "tools": [tool], "tool_choice": "required"},
            {"messages": [{**hi, "content": nested}]},
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [nested]}]},
            {"messages": [{**hi, "content": [{"type": "text", "text": "x"}] * count}]},
            {"messages": [hi], "chat_template_kwargs": {"enable_thinking": nested}},
            {"messages": [{"role": 3}, None, []][: rng.randint(1, 3)]},
        ]
    )


def body(rng: Random) -> bytes:
    """Draws a whole HTTP request, or bytes that begin like one."""
    good = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
    count = rng.choice([3, 300, 3000, 90_000])
    mutated = bytearray(good)
    for _ in range(rng.randint(1, 8)):
        mutated[rng.randrange(len(mutated))] = rng.randrange(256)
    values = ["1e999", "-1", "[" * count, '"\\ud800"', "{}", "null", "NaN", "9" * count, '"x"']
    names = ["max_tokens", "temperature", "stop", "logit_bias", "prompt", "n", "seed", "logprobs"]
    field = f'{{"prompt":"hi","{rng.choice(names)}":{rng.choice(values)}}}'.encode()
    body = rng.choice([bytes(mutated), field, good[:-3], rng.randbytes(count), b"", good * count])
    path = rng.choice(["completions", "chat/completions", "messages", "responses", "nowhere"])
    length = rng.choice([str(len(body))] * 6 + [str(len(body) // 2), "-1", "x", "99999999999999"])
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunked = (
        head + "Transfer-Encoding: chunked\r\n\r\n" + rng.choice(["zz\r\n", "5\r\nab", "0\r\n\r\n"])
    )
    whole = f"{head}Connection: close\r\nContent-Length: {length}\r\n\r\n".encode() + body
    return rng.choice([whole, whole, whole, chunked.encode(), rng.randbytes(200), whole[:50]])


def message(rng: Random) -> bytes:
    """Draws a gRPC request that is no message, or one with hostile fields."""
    count = rng.choice([3, 300, 90_000])
    good = pb.GenerateRequest(text="hi", max_tokens=2)
    mutated = bytearray(good.SerializeToString())
    mutated[rng.randrange(len(mutated))] = rng.randrange(256)
    infinite = rng.choice([math.nan, math.inf, -1e308])
    fields: list[dict[str, Any]] = [
        {"text": "x" * count},
        {"token_ids": pb.TokenIds(ids=[2**32 - 1] * min(count, 300))},
        {"token_ids": pb.TokenIds(ids=[])},
        {"text": "hi", "request_id": "\x00" * count},
        {"text": "hi", "stop": ["ab"] * count},
        {"text": "hi", "stop_token_ids": [2**32 - 1] * count},
        {"text": "hi", "logit_bias": dict.fromkeys(range(count), infinite)},
        {"text": "hi", "temperature": infinite, "top_p": infinite, "min_p": infinite},
        {"text": "hi", "max_tokens": 2**32 - 1, "min_tokens": 2**32 - 1, "top_k": 2**32 - 1},
        {"text": "hi", "logprobs": 2**32 - 1, "prompt_logprobs": 2**31},
        {"text": "hi", "priority": -(2**31), "cache_salt": "x" * count},
    ]
    message = pb.GenerateRequest(**{"max_tokens": 2, **rng.choice(fields)})
    return rng.choice([bytes(mutated), rng.randbytes(count), message.SerializeToString()])
