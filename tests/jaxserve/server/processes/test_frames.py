"""Frames survive the way over a socket pair; a lost end is noticed."""

import socket

import pytest

from jaxserve.engine.request import SamplingParams, TokenLogprobs, TokenOutput
from jaxserve.errors import DrainingError, InvalidRequestError, OverloadedError
from jaxserve.fleet.request_frames import KNOWN, GrammarOf, Refusal
from jaxserve.server.processes import frames


def test_frames_in_both_directions() -> None:
    engine, face = map(frames.channel_over, socket.socketpair())
    params = SamplingParams(stop=("a", "b"), logit_bias={7: 0.5}, seed=2**32 - 1)
    submit = frames.Submit(1, "r", [3, 4], params, "tenant", None, GrammarOf("x", b"</think>"))
    scored = TokenOutput(
        request_id="r", token_ids=[5], logprobs=[TokenLogprobs(5, -0.25, ((5, -0.25),))]
    )
    face.send(frames.encode(frames.Cancel("q")))
    face.send(frames.encode(submit))
    assert frames.decode_to_engine(engine.receive()) == frames.Cancel("q")
    assert frames.decode_to_engine(engine.receive()) == submit
    engine.send(frames.encode(frames.Outputs([scored])))
    assert frames.decode_to_face(face.receive()) == frames.Outputs([scored])
    engine.close()
    with pytest.raises(EOFError):
        face.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        face.send(b"")
    face.close()


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
