"""The real grpcurl against the server, as people call it from a shell.

`make test` puts it into build/bin once, where Go can; elsewhere these tests are skipped.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jaxserve.server.faces import Faces

BUILT = Path(__file__).resolve().parents[3] / "build" / "bin" / "grpcurl"
GRPCURL = str(BUILT) if BUILT.is_file() else shutil.which("grpcurl")
SECONDS = 30

pytestmark = pytest.mark.skipif(
    GRPCURL is None,
    reason="no grpcurl: neither in build/bin (make test builds it with Go) nor PATH",
)


@pytest.fixture(scope="module")
def rig() -> Iterator[Faces]:
    rig = Faces()
    yield rig
    rig.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([GRPCURL, *arguments], capture_output=True, text=True, timeout=SECONDS)


def call(rig: Faces, method: str, **fields: Any) -> list[Any]:
    """The messages that came back."""
    body = json.dumps(fields)
    done = run("-plaintext", "-d", body, rig.grpc_address, f"jaxserve.v1.Inference/{method}")
    assert done.returncode == 0, done.stderr
    decoder, messages, rest = json.JSONDecoder(), [], done.stdout.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        messages.append(message)
        rest = rest[end:].strip()
    return messages


def test_reflection_lists_and_describes(rig: Faces) -> None:
    listed = run("-plaintext", rig.grpc_address, "list")
    assert {"grpc.health.v1.Health", "jaxserve.v1.Inference"} < set(listed.stdout.split())
    methods = run("-plaintext", rig.grpc_address, "list", "jaxserve.v1.Inference").stdout
    assert "jaxserve.v1.Inference.GenerateStream\n" in methods
    request = ("describe", "jaxserve.v1.GenerateRequest")
    described = run("-plaintext", rig.grpc_address, *request).stdout
    assert "optional double temperature = 5;" in described
    assert ".jaxserve.v1.StructuredOutputs structured_outputs = 22;" in described


def test_health(rig: Faces) -> None:
    done = run("-plaintext", rig.grpc_address, "grpc.health.v1.Health/Check")
    assert json.loads(done.stdout) == {"status": "SERVING"}


def test_a_completion(rig: Faces) -> None:
    (answer,) = call(rig, "Generate", text="hi", max_tokens=7, request_id="a", logprobs=1)
    assert answer["text"] == "one two"
    assert answer["finish"]["reason"] == "FINISH_REASON_LENGTH"
    assert answer["finish"]["usage"] == {"prompt_tokens": 3, "completion_tokens": 7}
    assert len(answer["logprobs"]) == 7


def test_a_stream(rig: Faces) -> None:
    events = call(rig, "GenerateStream", token_ids={"ids": [5, 6]}, temperature=0)
    assert events[0]["prompt"]["prompt_tokens"] == 2
    assert "".join(event.get("delta", {}).get("text", "") for event in events) == "one two three"
    assert events[-1]["finish"]["reason"] == "FINISH_REASON_STOP"


def test_a_bad_field_is_named(rig: Faces) -> None:
    body = json.dumps({"text": "hi", "temperature": -1})
    done = run("-plaintext", "-d", body, rig.grpc_address, "jaxserve.v1.Inference/Generate")
    assert done.returncode == 64 + 3  # grpcurl's for INVALID_ARGUMENT
    assert "Message: temperature: -1.0 is not in [0, 2]" in done.stderr
    assert '"@type": "type.googleapis.com/google.rpc.BadRequest"' in done.stderr
