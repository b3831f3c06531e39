"""Load-generating client of OpenAI's completions: streamed requests with the times of their tokens.

Implements HTTP/1.1 itself, since otherwise a slow client would be measured instead of the server.
Used by all benchmarks and by `chaos/`; works against any server of that API.
"""

import asyncio
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

LIMIT = 2**22
"""Read buffer of one answer, in bytes."""


class Outcome(msgspec.Struct, kw_only=True):
    """Outcome of a request; times are seconds after its start.

    Attributes:
      start: start time, by `time.perf_counter`.
      arrivals: times of the events that had text.
      tokens: tokens of the completion, as the server counts them; else the number of events.
      prompt_tokens: tokens of the prompt, as the server counts them.
      text: text of the completion.
      token_ids: its tokens, where the request asked for them (`return_token_ids`).
      end: time of the end of the answer.
      error: why it failed; empty if it succeeded.
    """

    start: float
    arrivals: list[float] = []
    tokens: int = 0
    prompt_tokens: int = 0
    text: str = ""
    token_ids: list[int] = []
    end: float = 0.0
    error: str = ""


def completion_body(prompt: str | list[int], tokens: int, **fields: Any) -> bytes:
    """JSON of a streamed completion of exactly `tokens` greedy tokens, which reports its usage."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body | fields)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] = []


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Client:
    """Sends requests to one server over a pool of connections.

    Args:
      url: URL of the server, as in http://127.0.0.1:8000.
      key: API key, or empty.
      seconds: deadline of a request.
    """

    def __init__(self, url: str, key: str = "", seconds: float = 600.0):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._key = f"Authorization: Bearer {key}\r\n" if key else ""
        self._seconds = seconds
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def complete(
        self, body: bytes, outcome: Outcome | None = None, idempotency_key: str = ""
    ) -> Outcome:
        """Sends one streamed completion; `body` is JSON that requests usage. A caller that cancels
        it, or looks at it in between, passes the outcome to fill in."""
        outcome = outcome or Outcome(start=time.perf_counter())
        try:
            async with asyncio.timeout(self._seconds):
                await self._complete(body, outcome, idempotency_key)
        except (OSError, EOFError, ValueError, msgspec.DecodeError, TimeoutError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.end = time.perf_counter() - outcome.start
        return outcome

    def close(self) -> None:
        """Closes the connections."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _complete(self, body: bytes, outcome: Outcome, idempotency_key: str) -> None:
        key = f"Idempotency-Key: {idempotency_key}\r\n" if idempotency_key else ""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=LIMIT
            )
        done = False
        try:
            writer.write(
                f"POST {self._path}/v1/completions HTTP/1.1\r\nHost: {self._host}\r\n{self._key}"
                f"{key}Content-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status != 200:
                raise ValueError(f"status {status}: {(await reader.read(500))!r}")
            if b"transfer-encoding: chunked" not in head.lower():
                raise ValueError("the answer is no stream")
            await self._events(reader, outcome)
            done = True
        finally:
            if done:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _events(self, reader: asyncio.StreamReader, outcome: Outcome) -> None:
        """Reads the chunks of the body and the events in them."""
        waiting, rest = b"", b""
        while True:
            # Take all available data at once: one read per line would dominate the cost.
            if not (news := await reader.read(LIMIT)):
                raise EOFError("the answer ended in the middle")
            waiting += news
            while (line := waiting.find(b"\r\n")) >= 0:
                size = int(waiting[:line], 16)
                end = line + 2 + size
                if len(waiting) < end + 2:
                    break
                part, waiting = rest + waiting[line + 2 : end], waiting[end + 2 :]
                if not size:
                    return
                *events, rest = part.split(b"\n\n")
                for event in events:
                    self._event(event, outcome)

    def _event(self, event: bytes, outcome: Outcome) -> None:
        data = event.removeprefix(b"data: ").strip()
        if data == b"[DONE]" or not data:
            return
        chunk = self._decoder.decode(data)
        if chunk.error is not None:
            raise ValueError(f"the server says {chunk.error}")
        if chunk.choices:
            outcome.arrivals.append(time.perf_counter() - outcome.start)
            outcome.text += chunk.choices[0].text
            outcome.token_ids += chunk.choices[0].token_ids
        if chunk.usage is not None:
            outcome.tokens = chunk.usage.completion_tokens
            outcome.prompt_tokens = chunk.usage.prompt_tokens
