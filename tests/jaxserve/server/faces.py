"""Both faces of a server over one fake engine, and clients for them."""

from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from jaxserve.config.sections import Server
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.access import Access
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.rpc import InferenceStub
from tests.jaxserve.server.http.rig import SECONDS, HttpRig

ALICE, BOB = "key-of-alice-0123456789", "key-of-bob-0123456789"


def rpc_error(call: Callable[..., object], *arguments: Any, **options: Any) -> tuple[str, str]:
    """The name of the status, and the message, with which an RPC fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    return caught.value.code().name, caught.value.details()


def first_delta(call: grpc.Call) -> grpc.Call:
    """The call, once its first text has come."""
    next(event for event in call if event.HasField("delta"))
    return call


class Faces(HttpRig):
    """An HTTP server and a gRPC server over one engine, and clients without TLS."""

    def __init__(self, access: Access | None = None, limits: Any = None, **options: Any):
        super().__init__(access=access, **(limits or {}), **options)
        self._grpc = GrpcServer(Server(grpc_port=0), access=access, **(limits or {}))
        self.grpc_address = self._grpc.start()
        self.channel = grpc.insecure_channel(self.grpc_address)
        self._grpc.open(self.generator, self.metrics)
        self.stub = InferenceStub(self.channel)

    def close(self) -> None:
        self.channel.close()
        self._grpc.stop(0)
        super().close()

    def refuse(self) -> None:
        self._grpc.refuse()
        self.server.refuse()

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

    def begun(self, **fields: Any) -> grpc.Call:
        """A stream whose first tokens have come, of three that the engine sends at most."""
        self.engine.allowed = 3
        return first_delta(self.stream(text="hi", **fields))

    def grpc_error(self, **fields: Any) -> tuple[str, str]:
        """Status and message."""
        return rpc_error(self.generate, **{"text": "hi", **fields})

    def untouched(self) -> bool:
        """Whether no request has reached the engine, and the next one on both faces does."""
        before = len(self.engine.prompts)
        http = self.post().json()["choices"][0]["text"]
        rpc = self.generate(text="hi").text
        return before == 0 and http == rpc == "one two three"
