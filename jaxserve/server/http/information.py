"""Handlers for health probes, the version, the list of models and the tokenizer."""

import time

from msgspec import UNSET

import jaxserve
from jaxserve.errors import InvalidRequestError
from jaxserve.server.access import without_addresses
from jaxserve.server.http import responses
from jaxserve.server.http.errors import HttpError
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.requests import DetokenizeRequest, TokenizeRequest
from jaxserve.server.http.service import Service
from jaxserve.text.tokenizer import Tokenizer


async def tokenize(service: Service, exchange: HttpExchange) -> None:
    """Text or a conversation to token ids."""
    request = await exchange.read(TokenizeRequest)
    service.model(request.model)
    await exchange.reply(await service.in_thread(_tokens, service, request))


def _tokens(service: Service, request: TokenizeRequest) -> responses.Tokens:
    generator = service.ready()
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("prompt", "set either prompt or messages")
    if request.prompt is not None:
        token_ids = generator.encode(request.prompt, add_bos=request.add_special_tokens)
    else:
        text = service.chat_template(request.chat_template).render(
            request.messages,
            tools=request.tools or None,
            add_generation_prompt=request.add_generation_prompt,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        token_ids = generator.encode(text, add_bos=False, field="messages")
    texts = None
    if request.return_token_strs:
        texts = [generator.tokenizer.decode([token_id]) for token_id in token_ids]
    return responses.Tokens(
        count=len(token_ids),
        max_model_len=int(generator.engine.model_info()["max_length"]),
        tokens=token_ids,
        token_strs=texts,
    )


async def detokenize(service: Service, exchange: HttpExchange) -> None:
    """Token ids to text."""
    request = await exchange.read(DetokenizeRequest)
    service.model(request.model)
    generator = service.ready()
    vocab_size = int(generator.engine.model_info()["vocab_size"])
    for index, token_id in enumerate(request.tokens):
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"tokens[{index}]", f"{token_id} is not in [0, {vocab_size - 1}]"
            )
    text = await service.in_thread(generator.tokenizer.decode, request.tokens)
    await exchange.reply(responses.DetokenizedText(prompt=text))


STUCK_SECONDS = 60.0
"""A step loop without an iteration for this long is not alive; steps have shorter deadlines."""


async def health(service: Service, exchange: HttpExchange) -> None:
    """Whether the process lives.

    It lives while it starts, or if its step loop has iterated recently. Problems of workers that
    this process needs are named, and do not make it any less alive.
    """
    loop = service.step_loop
    status = "starting" if loop is None else loop.status
    stuck = 0.0
    if loop is not None and status in ("ready", "draining"):
        stuck = time.monotonic() - loop.last_turn
    if status in ("failed", "closed") or stuck > STUCK_SECONDS:
        why = f"the step loop has not moved for {stuck:.0f} s" if stuck > STUCK_SECONDS else status
        raise HttpError(503, f"not alive: {why}", code="not_alive")
    found = service.generator.engine.load().problems if service.generator is not None else []
    if not exchange.tenant:  # the client has shown no key
        found = [without_addresses(problem) for problem in found]
    await exchange.reply(responses.Status(status=status, problems=found or UNSET))


async def ready(service: Service, exchange: HttpExchange) -> None:
    """Whether requests are taken."""
    status = service.loop_ready().status
    if status != "ready":
        raise HttpError(503, f"not ready: {status}", code="not_ready")
    await exchange.reply(responses.Status(status="ready"))


async def version(service: Service, exchange: HttpExchange) -> None:
    """The version of jaxserve."""
    await exchange.reply(responses.Version(version=jaxserve.__version__))


async def models(service: Service, exchange: HttpExchange) -> None:
    """The models that are served."""
    names = service.model_names()
    await exchange.reply(responses.ModelList(data=[_model(service, name) for name in names]))


async def model(service: Service, exchange: HttpExchange) -> None:
    """A model that is served."""
    name = service.model(exchange.scope["path_params"]["model"])
    await exchange.reply(_model(service, name))


async def load(service: Service, exchange: HttpExchange) -> None:
    """How many requests are being served."""
    await exchange.reply(responses.ServerLoad(server_load=service.active_requests))


async def tokenizer_info(service: Service, exchange: HttpExchange) -> None:
    """The tokenizer and the chat template."""
    generator = service.ready()
    tokenizer = generator.tokenizer
    bos = tokenizer.bos_token_id
    await exchange.reply(
        responses.TokenizerInfo(
            vocab_size=tokenizer.vocab_size,
            model_max_length=int(generator.engine.model_info()["max_length"]),
            bos_token_id=bos,
            bos_token=None if bos is None else _name(tokenizer, bos),
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            eos_tokens=[_name(tokenizer, token_id) for token_id in sorted(tokenizer.eos_token_ids)],
            chat_template=None if service.template is None else service.template.source,
        )
    )


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], special=True)


def _model(service: Service, name: str) -> responses.Model:
    info = service.ready().engine.model_info()
    root = str(info["model"])
    return responses.Model(
        id=name, root=root, created=service.created, max_model_len=info["max_length"]
    )
