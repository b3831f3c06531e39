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
from jaxserve.server.jaxserve_pb2_grpc import InferenceStub
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.generator import TextGenerator
from tests.jaxserve.server.http.rig import TEMPLATE
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import LETTERS, ids_of

SECONDS = 20
"""No client of these tests waits longer."""


class Faces:
    """Servers, their engine, behind `front` if that is given, and clients without TLS."""

    def __init__(
        self,
        access: Access | None = None,
        template: str = TEMPLATE,
        front: Callable[[FakeEngine], Any] = lambda engine: engine,
    ):
        self.engine = FakeEngine(ids_of("one two three"))
        self.generator = TextGenerator(front(self.engine), LETTERS)
        self._grpc = GrpcServer(port=0, access=access)
        self._http = HttpServer(port=0, access=access)
        self.grpc_address, self.address = self._grpc.start(), self._http.start()
        self.channel = grpc.insecure_channel(self.grpc_address)
        self._grpc.open(self.generator)
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

    def grpc_error(self, **fields: Any) -> tuple[grpc.StatusCode, str]:
        """Status and message."""
        with pytest.raises(grpc.RpcError) as caught:
            self.stub.Generate(pb.GenerateRequest(**{"text": "hi", **fields}), timeout=SECONDS)
        return caught.value.code(), caught.value.details()

    def untouched(self) -> bool:
        """Whether no request has reached the engine, and the next one on both faces does."""
        before = len(self.engine.prompts)
        http = self.post().json()["choices"][0]["text"]
        rpc = self.stub.Generate(pb.GenerateRequest(text="hi"), timeout=SECONDS).text
        return before == 0 and http == rpc == "one two three"
