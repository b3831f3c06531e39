"""Both faces of a server over one fake engine, and clients for them."""

from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.access import Access
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.http.server import HttpServer
from jaxserve.server.metrics import Metrics
from jaxserve.server.rpc import InferenceStub
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.generator import TextGenerator
from jaxserve.text.tokenizer import Tokenizer
from tests.jaxserve.server.http.rig import TEMPLATE
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import LETTERS, ids_of

ALICE, BOB = "key-of-alice-0123456789", "key-of-bob-0123456789"
SECONDS = 20
"""No client of these tests waits longer."""


def rpc_error(call: Callable[..., object], *arguments: Any, **options: Any) -> tuple[str, str]:
    """The name of the status, and the message, with which an RPC fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    return caught.value.code().name, caught.value.details()


class Faces:
    """Servers, their engine, and clients without TLS."""

    def __init__(
        self,
        access: Access | None = None,
        template: str = TEMPLATE,
        tokenizer: Tokenizer = LETTERS,
        front: Callable[[FakeEngine], Any] = lambda engine: engine,
        **options: Any,
    ):
        self.engine, self.metrics = FakeEngine(ids_of("one two three")), Metrics("fake")
        self.generator = TextGenerator(front(self.engine), tokenizer)
        self._grpc = GrpcServer(port=0, access=access, **options)
        self._http = HttpServer(port=0, access=access, **options)
        self.grpc_address, self.address = self._grpc.start(), self._http.start()
        self.channel = grpc.insecure_channel(self.grpc_address)
        self._grpc.open(self.generator, self.metrics)
        self._http.open(self.generator, ChatTemplate({"default": template}))
        self.stub = InferenceStub(self.channel)
        self.client = httpx.Client(base_url=f"http://{self.address}", timeout=SECONDS)

    def close(self) -> None:
        self.client.close()
        self.channel.close()
        self._grpc.stop(0)
        self._http.stop(0)
        self.generator.close()
        self.engine.close()

    def refuse(self) -> None:
        self._grpc.refuse()
        self._http.refuse()

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        fields = {"prompt": "hi", **fields} if path == "/v1/completions" else fields
        return self.client.post(path, json=fields)

    def http_error(self, path: str = "/v1/completions", **fields: Any) -> tuple[int, str]:
        """Status and field."""
        response = self.post(path, **fields)
        return response.status_code, response.json()["error"]["param"]

    def generate(self, **fields: Any) -> pb.GenerateResponse:
        return self.stub.Generate(pb.GenerateRequest(**fields), timeout=SECONDS)

    def stream(self, **fields: Any) -> grpc.Call:
        return self.stub.GenerateStream(pb.GenerateRequest(**fields), timeout=SECONDS)

    def refused(self, **fields: Any) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            self.generate(**fields)
        return caught.value

    def grpc_error(self, **fields: Any) -> tuple[str, str]:
        """Status and message."""
        return rpc_error(self.generate, **{"text": "hi", **fields})

    def untouched(self) -> bool:
        """Whether no request has reached the engine, and the next one on both faces does."""
        before = len(self.engine.prompts)
        http = self.post().json()["choices"][0]["text"]
        rpc = self.generate(text="hi").text
        return before == 0 and http == rpc == "one two three"
