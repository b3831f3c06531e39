"""The Python face: `LLM("configs/demo.yaml").generate(prompts, SamplingParams(...))`.

Builds an engine in this process and waits for it; no network, no event loop. Importing this module
starts no JAX backend, creating an `LLM` does.
"""

import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from jaxserve.checkpoint.fingerprint import forget_revisions
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.engine.request import FinishReason, SamplingParams, TokenLogprobs
from jaxserve.errors import ConfigError, EngineFailedError, InvalidRequestError, OverloadedError
from jaxserve.fleet.assembly import Options
from jaxserve.fleet.here import open_here
from jaxserve.fleet.sizing import Sizing
from jaxserve.observe.recorder import Recorder
from jaxserve.text.chat import FILES, ChatTemplate
from jaxserve.text.generation import Generation
from jaxserve.text.generator import Prompt, TextGenerator
from jaxserve.text.output import GenerationOutput, merge
from jaxserve.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""One message of a conversation: `role`, `content`, and what chat templates read beside them."""

LOOK_SECONDS = 1.0
"""How often a waiting call looks whether the engine still lives."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its completion.

    Attributes:
      prompt: the text, or None if token ids were given.
      prompt_token_ids: token ids that the model saw, bos included.
      text: the completion, without stop strings and special tokens.
      token_ids: token ids of the completion, without an end id.
      finish_reason: "stop" or "length".
      stop_string, stop_token_id: the cause, if the reason is "stop".
      logprobs: log-probabilities of `token_ids`, if `SamplingParams.logprobs` asked for them.
      prompt_logprobs: the same for the prompt's tokens, the first of which has none.
      cached_token_count: tokens of the prompt that were found in the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_token_count: int = 0


class LLM:
    """A model, loaded and warm, that completes prompts. A context manager; safe for threads.

    Args:
      deployment: a YAML file, a model folder, an id on the Hugging Face Hub, or a `Deployment`; of
        a fleet one domain runs here, which prefills its prompts itself.
      overrides: dotted keys over the file's values, as in `{"attention.dp": 3, "lanes": 2}`.
      recorder: measures the stages.

    Raises:
      ConfigError, CheckpointError: the message names the field or the files.
    """

    def __init__(
        self,
        deployment: str | Path | Deployment,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        *,
        recorder: Recorder | None = None,
    ):
        forget_revisions()  # of a folder that may have been replaced since another LLM read it
        if not isinstance(deployment, Deployment):
            sizing = Sizing(stages=recorder is not None)
            deployment = load_deployment(deployment, overrides, choose=sizing)
            sizing.log()
        elif overrides:
            raise ConfigError("overrides: only with a file or folder; a Deployment is complete")
        self.deployment = deployment
        self.tokenizer = Tokenizer.from_folder(deployment.model)
        self._engine = open_here(deployment, Options(recorder=recorder))
        self._generator = TextGenerator(self._engine, self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts together.

        Args:
          prompts: a text, a list of token ids, or a list of either.
          params: for all prompts, or one for each; None: the defaults.

        Returns:
          one output a prompt, in their order.

        Raises:
          InvalidRequestError: a prompt or a parameter is wrong (of several prompts it says which);
            then nothing has been submitted.
          EngineFailedError: the engine failed meanwhile.
        """
        several = _as_list(prompts)
        everyone = _one_each(params, len(several), "prompts")
        requests = []
        for index, (prompt, own) in enumerate(zip(several, everyone, strict=True)):
            try:
                token_ids = self._generator.encode(prompt)
                self._check(token_ids, own)
                requests.append((prompt, token_ids, own))
            except InvalidRequestError as error:
                if len(several) == 1:
                    raise
                raise InvalidRequestError(
                    f"prompts[{index}].{error.field}", error.message
                ) from None
        return _PromptBatch(self._generator, requests).run()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations together, in the form that the model's chat template gives them.

        Args:
          messages: one conversation, or a list of them; each a list of messages such as
            `{"role": "user", "content": "Hello"}`.
          params: for all conversations, or one for each; None: the defaults.
          tools: functions that the model may call, as JSON schemas.
          add_generation_prompt: False to go on with the last message instead of answering it.
          chat_template_kwargs: switches of the template, such as `{"enable_thinking": False}`.

        Returns:
          one output a conversation, in their order; `prompt` is the text the template made.

        Raises:
          InvalidRequestError: names the field that is wrong (`messages[2].role`), or says that the
            model has no chat template; then nothing has been submitted.
          CheckpointError: the template itself is broken.
          EngineFailedError: the engine failed meanwhile.
        """
        several = _conversations(messages)
        everyone = _one_each(params, len(several), "conversations")
        requests: list[_Item] = []
        for (field, conversation), own in zip(several.items(), everyone, strict=True):
            text = self._render(
                conversation, field, tools, add_generation_prompt, chat_template_kwargs
            )
            token_ids = self._encode_chat(text, field)
            self._check(token_ids, own, f"{field}." if len(several) > 1 else "")
            requests.append((text, token_ids, own))
        return _PromptBatch(self._generator, requests).run()

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of one conversation, as `chat` makes them; for `stream` and `generate`.

        Raises:
          InvalidRequestError, CheckpointError: as `chat`.
        """
        text = self._render(
            messages, "messages", tools, add_generation_prompt, chat_template_kwargs
        )
        return self._encode_chat(text, "messages")

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's; None where the folder has none. Raises CheckpointError if it is broken."""
        return ChatTemplate.from_folder(self.deployment.model)

    def _render(
        self,
        messages: Sequence[Message],
        field: str,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        if self.chat_template is None:
            raise InvalidRequestError(
                "messages",
                f"{Path(self.deployment.model).name} has no chat template (none of "
                f"{', '.join(FILES)} has one); it can complete texts",
            )
        return self.chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
            field=field,
        )

    def _encode_chat(self, text: str, field: str) -> list[int]:
        return self._generator.encode(text, add_bos=False, field=field)

    def _check(self, token_ids: list[int], params: SamplingParams, where: str = "") -> None:
        """Raises InvalidRequestError, with the place before the field, where a submission would."""
        try:
            self._generator.check(params)
            self._engine.check(token_ids, params)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}{error.field}", error.message) from None

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[GenerationOutput]:
        """Completes one prompt, piece by piece; leaving the loop early cancels the request.

        The request is submitted when the first piece is asked for.

        Raises:
          InvalidRequestError: a field is out of range; at once.
          OverloadedError, EngineFailedError: with the first piece, or a later one.
        """
        params = params or SamplingParams()
        token_ids = self._generator.encode(prompt)
        self._check(token_ids, params)
        return self._pieces(token_ids, params)

    def close(self) -> None:
        """Ends what runs and frees the devices; again is fine."""
        self._engine.close()
        self._generator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _pieces(self, token_ids: list[int], params: SamplingParams) -> Iterator[GenerationOutput]:
        pieces: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
        generation = self._generator.submit(token_ids, params, pieces.put)
        try:
            while True:
                try:
                    piece = pieces.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    _check_alive(generation)
                    continue
                _check_completed(piece, generation)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            generation.cancel()


_Item = tuple[Prompt, list[int], SamplingParams]


class _PromptBatch:
    """Runs checked prompts together, as many concurrently as the engine accepts."""

    def __init__(self, generator: TextGenerator, requests: Sequence[_Item]):
        self._generator = generator
        self._requests = requests
        self._waiting = deque(range(len(requests)))
        self._live: dict[int, Generation] = {}
        self._pieces: list[list[GenerationOutput]] = [[] for _ in requests]
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run(self) -> list[RequestOutput]:
        """Submits everything, waits for everything; an error or Ctrl-C cancels what still runs."""
        try:
            self._submit()
            while self._waiting or self._live:
                try:
                    index = self._ended.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    for generation in self._live.values():
                        _check_alive(generation)
                    self._submit()
                    continue
                _check_completed(self._pieces[index][-1], self._live.pop(index))
                self._submit()
        finally:
            for generation in self._live.values():
                generation.cancel()
        return [self._output(index) for index in range(len(self._requests))]

    def _submit(self) -> None:
        """Submits until the engine's queue is full; the rest waits for a request to end."""
        while self._waiting:
            index = self._waiting[0]
            _, token_ids, params = self._requests[index]
            try:
                self._live[index] = self._generator.submit(
                    token_ids, params, partial(self._note, index)
                )
            except OverloadedError:
                return
            self._waiting.popleft()

    def _note(self, index: int, piece: GenerationOutput) -> None:
        """On the generator's thread: the caller's is woken once a request, not once a token."""
        self._pieces[index].append(piece)
        if piece.finish_reason is not None:
            self._ended.put(index)

    def _output(self, index: int) -> RequestOutput:
        prompt, token_ids, _ = self._requests[index]
        whole = merge(self._pieces[index])
        assert whole.finish_reason is not None
        return RequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=whole.finish_reason,
            stop_string=whole.stop_string,
            stop_token_id=whole.stop_token_id,
            logprobs=whole.logprobs,
            prompt_logprobs=whole.prompt_logprobs,
            cached_token_count=whole.cached_token_count,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], Integral):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> dict[str, Sequence[Message]]:
    """Returns conversations by the name that errors use for each."""
    if isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping | str):
        several = cast(Sequence[Sequence[Message]], messages)
        return {f"messages[{index}]": one for index, one in enumerate(several)}
    return {"messages": cast(Sequence[Message], messages)}


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, what: str
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError("params", f"{len(params)} of them for {count} {what}")
    grammars = [id(own.grammar) for own in params if own.grammar is not None]
    if len(set(grammars)) < len(grammars):
        raise InvalidRequestError("params", "several requests share a grammar: copy it for each")
    return list(params)


def _check_alive(generation: Generation) -> None:
    """Raises if nothing more will come because the engine is gone."""
    engine = generation.engine
    if engine.failure is not None:
        raise engine.failure
    if engine.status == "closed":
        raise EngineFailedError("the engine was closed while requests were running")


def _check_completed(piece: GenerationOutput, generation: Generation) -> None:
    """Raises for a request that neither stopped nor ran to its length."""
    if piece.finish_reason in ("cancelled", "error"):
        _check_alive(generation)
        raise EngineFailedError(
            f"request {piece.request_id} ended as {piece.finish_reason}: {piece.error}"
        )
