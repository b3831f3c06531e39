"""A running HTTP server with a fake engine behind it, and clients for it."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from jaxserve.config.sections import Server
from jaxserve.server.http.server import HttpServer
from jaxserve.server.metrics import Metrics
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.generator import TextGenerator
from jaxserve.text.tokenizer import Tokenizer
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import LETTERS, ids_of

SECONDS = 20
"""No client of these tests waits longer."""

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
    "{# <tool_call> #}"
)


HI = {"role": "user", "content": "hi"}
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [HI]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "fake", "max_tokens": 500, "messages": [HI]},
}
"""Fields of a request that would be answered."""


class HttpRig:
    """A server with everything around it, opened."""

    def __init__(
        self,
        script: str = "one two three",
        tokenizer: Tokenizer = LETTERS,
        template: str | None = TEMPLATE,
        max_length: int = 100,
        front: Callable[[FakeEngine], Any] = lambda engine: engine,
        **server: Any,
    ):
        self.engine = FakeEngine(ids_of(script), max_length=max_length)
        self.metrics = Metrics("fake")
        self.metrics.watch(self.engine)
        self.generator = TextGenerator(front(self.engine), tokenizer, self.metrics.started)
        fields = {name: server.pop(name) for name in Server.__struct_fields__ if name in server}
        settings = Server(http_port=0, **{"unknown_fields": "refuse", **fields})
        self.server = HttpServer(settings, **server)
        self.address = self.server.start()
        self.template = None if template is None else ChatTemplate({"default": template})
        self.server.open(self.generator, self.template, metrics=self.metrics)
        self.url = f"http://{self.address}"
        self.client = httpx.Client(base_url=self.url, timeout=SECONDS)

    def close(self) -> None:
        self.client.close()
        self.server.stop(0)
        self.generator.close()
        self.engine.close()

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "hi", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": [HI], **fields})

    @contextlib.contextmanager
    def streaming(self, headers: Any = None, **fields: Any) -> Iterator[Iterator[str]]:
        """A stream that has begun, of which the engine has sent at most three tokens."""
        self.engine.allowed = 3
        fields = {"prompt": "hi", "stream": True} | fields
        post = self.client.stream("POST", "/v1/completions", json=fields, headers=headers)
        with post as call:
            lines = until_first_event(call)  # who drops it closes the connection
            yield lines

    def refused(self, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
        """The error of a request that is wrong."""
        response = self.client.post(path, json=RIGHT.get(path, {}) | fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        return error


Make = Callable[..., HttpRig]


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, the last one, [DONE], left out."""
    assert response.headers["content-type"] == "text/event-stream"
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def until_first_event(response: httpx.Response) -> Iterator[str]:
    """The lines of a stream that is open, the first one taken."""
    lines = response.iter_lines()
    assert next(lines).startswith("data: ")
    return lines
