"""The front end as HTTP handlers use it: with the model's name, templates, metrics and usage.

Made by `server.py`, used by the handlers. Knows no routes and no bodies.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.config.sections import Server
from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.fleet.request_frames import check_unused, has_key, keyed_id
from jaxserve.server.front_end import FrontEnd, Job, LiveRequests, NotReadyError, Source
from jaxserve.server.http.errors import HttpError
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.requests import MAX_CHOICES, SamplingFields, StreamOptions
from jaxserve.server.http.response_store import ResponseStore
from jaxserve.server.http.responses import (
    ChatChunk,
    Completion,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from jaxserve.server.metrics import Metrics
from jaxserve.text.chat import FILES, ChatTemplate
from jaxserve.text.generation import new_request_id
from jaxserve.text.output import GenerationOutput

logger = logging.getLogger(__name__)

MAX_TOLD, MAX_NAME = 1000, 100
"""Most names of unknown fields that are logged, and most characters of one."""
COMPLETIONS = "/v1/completions"
"""The route whose prompts are no chats."""
MAX_ACTIVE = 2048
"""Requests that are read, run or answered at a time; more are refused before they are read."""


class Service(FrontEnd):
    """The state behind the handlers. Lives on the server's event loop.

    Args:
      settings: the deployment's.
      max_pending_tokens: tokens that may wait for a slow reader.
      messages_a_second: see `FrontEnd`.
      stores: whether responses are kept; other processes on the same port would not find them.

    Attributes:
      template: of chats; None where the model has none.
      stored: the responses that are kept; None: none are.
      metrics: None until the engine is ready.
      requests: of all clients, for operators; on the admin port.
      on_drain: starts the orderly end of the process.
      created: seconds of the epoch at which this server started.
    """

    def __init__(
        self,
        settings: Server,
        max_pending_tokens: int,
        messages_a_second: float,
        *,
        stores: bool,
    ):
        super().__init__(MAX_ACTIVE, max_pending_tokens, messages_a_second)
        self.template: ChatTemplate | None = None
        self.stored = ResponseStore() if stores else None
        self.metrics: Metrics | None = None
        self.requests: LiveRequests | None = None
        self.on_drain: Callable[[], None] | None = None
        self.created = int(time.time())
        self._settings = settings
        self._told: set[str] = set()
        self.left_out = self._note_unknown if settings.unknown_fields == "warn" else None

    def model_names(self) -> Sequence[str]:
        """Returns the names that requests may call the model by; the first is its name."""
        return self._settings.model_names or (str(self.ready().engine.model_info()["model"]),)

    def model(self, asked: str | None) -> str:
        """The name that was asked for, or the first; HttpError if the model is not called so."""
        self.ready()
        names = self.model_names()
        if asked is not None and asked not in names:
            served = " and ".join(map(repr, names))
            raise HttpError(
                404,
                f"model: {asked[:128]!r} is not served here; {served} is",
                param="model",
                code="model_not_found",
            )
        return asked or names[0]

    def chat_template(self, own: str | None) -> ChatTemplate:
        """The model's template, or the request's own. Takes long for that: not on an event loop.

        Raises:
          InvalidRequestError: there is none, or requests may not bring one, or it is invalid.
        """
        if own is None and self.template is None:
            raise InvalidRequestError(
                "messages",
                f"{self.model(None)} has no chat template (none of {', '.join(FILES)} has one); "
                "/v1/completions serves it",
            )
        if own is None:
            assert self.template is not None
            return self.template
        if not self._settings.request_templates:
            raise InvalidRequestError(
                "chat_template", "is not taken from requests; server.request_templates allows it"
            )
        try:
            return ChatTemplate({"default": own}, self._special_tokens(), "request")
        except CheckpointError as error:
            raise InvalidRequestError("chat_template", str(error)) from None

    def _special_tokens(self) -> dict[str, str]:
        """Returns the special tokens that a template may name."""
        if self.template is not None:
            return self.template.special_tokens
        tokenizer = self.ready().tokenizer
        bos = tokenizer.bos_token_id
        return {} if bos is None else {"bos_token": tokenizer.decode([bos], special=True)}

    def _note_unknown(self, name: str) -> None:
        name = re.sub(r"\.\d+(?=\.|$)", "[]", name)
        if name not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(name)
            logger.warning("requests set %r, which is not known here; told once", name[:MAX_NAME])

    def note_ignored(self, request: SamplingFields) -> None:
        """Warns, once for each field, of what a request has set without effect."""
        for name in request.IGNORED:
            if getattr(request, name) and name not in self._told:
                self._told.add(name)
                logger.warning("requests set %s, which has no effect here; told once", name)

    def live_requests(self) -> LiveRequests:
        """The requests of all clients, for operators; raises as `ready`."""
        self.check_draining()
        if self.requests is None:
            raise NotReadyError(self.absence)
        return self.requests

    @contextlib.asynccontextmanager
    async def answering(
        self, exchange: HttpExchange, jobs: Sequence[Job], *, stream: bool
    ) -> AsyncIterator[list[Source]]:
        """Jobs that run as long as their client stays; see `FrontEnd.running`."""
        if len(jobs) > MAX_CHOICES:
            raise InvalidRequestError("n", f"{len(jobs)} choices, at most {MAX_CHOICES}")
        # Unique whatever request id the client chose, and found in the log by that id.
        name = f"{exchange.request_id[:80]}.{new_request_id()[:12]}"
        if has_key(name):
            name = f"-{name}"  # no client can choose the id of a request with a key
        if key := exchange.idempotency_key:
            name = keyed_id(exchange.tenant, key, exchange.asked)
        names = [f"{name}.{job.index}" for job in jobs]
        deadline = time.monotonic() + self._settings.request_seconds
        running = self.running(
            *(jobs, names, deadline),
            stream=stream,
            owner=exchange.tenant,
            headers=exchange.headers,
            operation="text_completion" if exchange.scope["path"] == COMPLETIONS else "chat",
        )
        async with contextlib.AsyncExitStack() as stack:
            try:
                if key:
                    check_unused(name, self.ready().live_ids())
                sources = await stack.enter_async_context(running)
            except InvalidRequestError as error:
                if not key or error.field != "request_id":
                    raise
                raise HttpError(
                    409, f"idempotency-key: {error.message}", code="idempotency_conflict"
                ) from None
            await stack.enter_async_context(exchange.while_connected())
            yield sources


class UsageCount:
    """The tokens that the choices of a request took so far.

    Attributes:
      reasoning: tokens of the reasoning, which who parses answers counts.
    """

    def __init__(self, jobs: Sequence[Job], choices_a_prompt: int):
        self._choices = choices_a_prompt
        self._prompt = sum(len(job.token_ids) for job in jobs) // choices_a_prompt
        self._completion = 0
        self.reasoning = 0
        self._drafted: dict[
            int, tuple[int, int]
        ] = {}  # choice → drafts so far, and those that held
        self._cached: dict[int, int] = {}  # prompt → cached tokens of its first choice

    def add(self, source: Source, output: GenerationOutput) -> None:
        """Counts the tokens of an output."""
        self._completion += len(output.token_ids)
        if output.drafted_token_count:
            drafts = output.drafted_token_count, output.accepted_token_count
            self._drafted[source.job.index] = drafts
        prompt, choice = divmod(source.job.index, self._choices)
        if choice == 0:
            self._cached[prompt] = output.cached_token_count

    def usage(self) -> Usage:
        """The usage object of OpenAI's API."""
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=self._completion,
            total_tokens=self._prompt + self._completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
            completion_tokens_details=self._details(),
        )

    def _details(self) -> CompletionTokensDetails | UnsetType:
        if self._drafted:
            drafted, accepted = map(sum, zip(*self._drafted.values(), strict=True))
            return CompletionTokensDetails(
                reasoning_tokens=self.reasoning,
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=drafted - accepted,
            )
        if self.reasoning:
            return CompletionTokensDetails(reasoning_tokens=self.reasoning)
        return UNSET


class Chunks[Chunk: (ChatChunk, Completion)]:
    """The chunks of a stream, with the usage as the request asks for it.

    Args:
      chunk: what all chunks have in common.
    """

    def __init__(self, options: StreamOptions | None, chunk: Chunk, count: UsageCount):
        self._options, self._count = options or StreamOptions(), count
        self._chunk: Chunk = chunk

    def _encode(self, choices: list[Any]) -> bytes:
        chunk = msgspec.structs.replace(self._chunk, choices=choices)
        if self._options.include_usage:
            every = self._options.continuous_usage_stats
            chunk.usage = self._count.usage() if every else None
        return msgspec.json.encode(chunk)

    def last_chunk(self) -> bytes | None:
        """The chunk with the usage, if the request asks for it."""
        if not self._options.include_usage:
            return None
        chunk = msgspec.structs.replace(self._chunk, choices=[], usage=self._count.usage())
        return msgspec.json.encode(chunk)


def stop_reason(source: Source, output: GenerationOutput) -> str | int | None:
    """The client's stop string or token id that ended the text; EOS is not reported."""
    if output.stop_token_id in source.job.params.stop_token_ids:
        return output.stop_token_id
    return output.stop_string


async def together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs them at the same time; the first error ends the others and is raised."""
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
