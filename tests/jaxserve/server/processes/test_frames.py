"""Frames survive the way over a socket pair; a lost end is noticed."""

import socket

import pytest

from jaxserve.engine.request import SamplingParams, TokenLogprobs, TokenOutput
from jaxserve.errors import DrainingError, InvalidRequestError, OverloadedError
from jaxserve.fleet.request_frames import KNOWN, GrammarOf
from jaxserve.server.processes import frames
from jaxserve.server.processes.frames import Channel, Refusal
from tests.jaxserve.text.fake_engine import pipeline_view


def test_frames_in_both_directions() -> None:
    ours, theirs = socket.socketpair()
    engine, face = Channel(ours, frames.ToEngine), Channel(theirs, frames.ToFace)
    params = SamplingParams(stop=("a", "b"), logit_bias={7: 0.5}, seed=2**32 - 1)
    submit = frames.Submit(1, "r", [3, 4], params, "tenant", None, GrammarOf("x", b"</think>"))
    face.send([frames.Cancel("q"), submit])
    assert engine.receive() == frames.Cancel("q")
    assert engine.receive() == submit
    scored = TokenOutput(
        request_id="r", token_ids=[5], logprobs=[TokenLogprobs(5, -0.25, ((5, -0.25),))]
    )
    sent = [frames.Outputs([scored]), frames.Pipeline(pipeline_view(200))]
    engine.send(sent)
    assert [face.receive(), face.receive()] == sent
    engine.close()
    assert face.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        face.send([frames.AskPipeline()])
    face.close()
    assert engine.receive() is None


def test_errors_keep_what_clients_act_on() -> None:
    invalid = Refusal.of(InvalidRequestError("prompt[3]", "is no token id")).error()
    assert isinstance(invalid, InvalidRequestError)
    assert (invalid.field, invalid.message) == ("prompt[3]", "is no token id")
    overloaded = Refusal.of(OverloadedError("8 wait", retry_after_s=2.5)).error()
    assert isinstance(overloaded, OverloadedError)
    assert (str(overloaded), overloaded.retry_after_s) == ("8 wait", 2.5)
    assert isinstance(Refusal.of(DrainingError("drains")).error(), DrainingError)
    unknown = Refusal.of(KeyError("x"))
    assert unknown.kind not in KNOWN
    assert isinstance(unknown.error(), RuntimeError)
