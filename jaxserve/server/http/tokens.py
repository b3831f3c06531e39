"""POST /tokenize and /detokenize: text to token ids and back, with the model's tokenizer."""

from jaxserve.errors import InvalidRequestError
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.requests import DetokenizeRequest, TokenizeRequest
from jaxserve.server.http.responses import Text, Tokens
from jaxserve.server.http.service import Service


async def tokenize(service: Service, exchange: HttpExchange) -> None:
    """Text or a conversation to token ids."""
    request = await exchange.read(TokenizeRequest)
    service.model(request.model)
    await exchange.reply(await service.in_thread(_tokens, service, request))


def _tokens(service: Service, request: TokenizeRequest) -> Tokens:
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
    return Tokens(
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
    await exchange.reply(Text(prompt=text))
