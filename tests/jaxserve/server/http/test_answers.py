"""Whole answers to many requests, with the prompts and parameters that the engine got."""

import json
import re
from typing import Any
from unittest.mock import Mock

import msgspec

from jaxserve.engine.request import SamplingParams
from jaxserve.server.front_end import Job, Source
from jaxserve.server.http.service import UsageCount
from jaxserve.text.output import GenerationOutput
from tests import golden
from tests.jaxserve.server.http.rig import RIGHT, HttpRig
from tests.jaxserve.text.conversations import TOOLS
from tests.jaxserve.text.letters import LETTERS, ids_of

KEYS = (
    *("choices", "usage", "error", "output", "status", "tokens", "token_strs", "count", "prompt"),
    *("content", "stop", "input_tokens", "truncation", "incomplete", "tool_choice"),
)
"""Beginnings of the names of what depends on the request."""


def without_nothing(value: Any) -> Any:
    """Leaves out the values of objects that are null or empty, but for contents."""
    if isinstance(value, list):
        return [without_nothing(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if v not in (None, []) or k == "content"}
    return {k: without_nothing(v) for k, v in kept.items()}


def asked(prompt: list[int], params: SamplingParams) -> str:
    """The prompt, <s> where it has bos, and all parameters that are not the default."""
    default = msgspec.structs.asdict(SamplingParams())
    given = {k: v for k, v in msgspec.structs.asdict(params).items() if v != default[k]}
    given |= {"grammar": "a grammar"} if "grammar" in given else {}
    text = re.sub(r"([a-z])\1{99,}", lambda found: f"{found[1]}...", LETTERS.decode(prompt))
    return f"{'<s>' * (prompt[:1] == [0])}{text} {given}"


def test_answers(wide: HttpRig) -> None:
    """`golden/server/answers.txt` lists requests and answers; x{9} stands for nine letters."""

    def said(request: str) -> str:
        request, *says = request.split("\n")
        request = re.sub(r"([a-z])\{(\d+)\}", lambda found: found[1] * int(found[2]), request)
        path, fields = request.replace('"TOOLS"', json.dumps(TOOLS)).split(" ", 1)
        engine = wide.engine
        engine.script = ids_of(json.loads(says[0]) if says else "one two three")
        engine.prompts.clear()
        engine.params.clear()
        response = wide.client.post(path, json=RIGHT.get(path, {}) | json.loads(fields))
        body = {k: v for k, v in response.json().items() if k.startswith(KEYS)}
        text = json.dumps(without_nothing(body), ensure_ascii=False)
        text = re.sub(r"\b(resp|msg|rs|fc|call|toolu)_[0-9a-f]{8,}", r"\1_…", text)
        seen = map(asked, engine.prompts, engine.params)
        return "\n".join([f"{response.status_code} {text}", *seen])

    golden.check_each("server/answers.txt", said)


def test_a_bad_field_is_named(wide: HttpRig) -> None:
    """`golden/server/refusals.txt` lists paths with fields; the engine sees no request."""

    def said(mistake: str) -> str:
        path, fields = mistake.split(" ", 1)
        fields = re.sub(r"x\{(\d+)\}", lambda match: "x" * int(match[1]), fields)
        error = wide.refused(path, **json.loads(fields))
        assert error["code"] == "invalid_value"
        assert error["message"].startswith(f"{error['param']}: ")
        assert wide.engine.prompts == []
        return error["message"]

    golden.check_each("server/refusals.txt", said)


def test_drafts_are_counted_over_the_choices():
    jobs = [Job(index, [1, 2], SamplingParams()) for index in range(2)]
    count = UsageCount(jobs, 2)
    for job, drafted, accepted in ((jobs[0], 3, 1), (jobs[1], 3, 3), (jobs[0], 6, 4)):
        output = GenerationOutput(
            request_id="a",
            token_ids=[5],
            drafted_token_count=drafted,
            accepted_token_count=accepted,
        )
        count.add(Mock(spec=Source, job=job), output)
    details = msgspec.to_builtins(count.usage())["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 7,
        "rejected_prediction_tokens": 2,
    }
