"""The Python face: `LLM("configs/demo.yaml").generate(prompts, SamplingParams(...))`.

Builds an engine in this process and waits for it; no network, no event loop. Importing this module
starts no JAX backend, creating an `LLM` does.
"""

import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from jaxserve.config.deployment import Deployment, load_deployment
from jaxserve.engine.request import FinishReason, SamplingParams
from jaxserve.errors import ConfigError, EngineFailedError, InvalidRequestError, OverloadedError
from jaxserve.server.generation import (
    Generation,
    GenerationOutput,
    Prompt,
    TextGenerator,
    merge,
)
from jaxserve.server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

LOOK_SECONDS = 1.0
"""How often a waiting call looks whether the engine still lives."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its completion.

    Attributes:
      prompt: the text, or None where token ids were given.
      prompt_token_ids: what the model saw, bos included.
      text: the completion, without stop strings and special tokens.
      token_ids: its tokens; an end id is not among them.
      finish_reason: "stop" or "length".
      stop_string, stop_token_id: what ended it, where the reason is "stop".
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


class LLM:
    """A model, loaded and warm, that completes prompts. A context manager; safe for threads.

    Args:
      deployment: a YAML file, a model folder, or a `Deployment`.
      overrides: dotted keys over the file's values, as in `{"attention.dp": 3, "lanes": 2}`.

    Raises:
      ConfigError, CheckpointError: the message names the field or the files.
    """

    def __init__(
        self,
        deployment: str | Path | Deployment,
        overrides: Mapping[str, Any] | Sequence[str] = (),
    ):
        if not isinstance(deployment, Deployment):
            deployment = load_deployment(deployment, overrides)
        elif overrides:
            raise ConfigError("overrides: only with a file or folder; a Deployment is complete")
        self.deployment = deployment
        self.tokenizer = Tokenizer.from_folder(deployment.model)
        self._engine = open_engine(deployment)
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
        everyone = _one_each(params, len(several))
        requests = []
        for index, (prompt, own) in enumerate(zip(several, everyone, strict=True)):
            try:
                own.validate()
                requests.append((prompt, self._generator.encode(prompt), own))
            except InvalidRequestError as error:
                if len(several) == 1:
                    raise
                raise InvalidRequestError(
                    f"prompts[{index}].{error.field}", error.message
                ) from None
        return _Batch(self._generator, requests).run()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[GenerationOutput]:
        """Completes one prompt, piece by piece; leaving the loop early cancels the request.

        Raises:
          InvalidRequestError, OverloadedError, EngineFailedError
        """
        pieces: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
        generation = self._generator.submit(prompt, params or SamplingParams(), pieces.put)
        return self._pieces(generation, pieces)

    def close(self) -> None:
        """Ends what runs and frees the devices; again is fine."""
        self._engine.close()
        self._generator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _pieces(
        self, generation: Generation, pieces: "queue.SimpleQueue[GenerationOutput]"
    ) -> Iterator[GenerationOutput]:
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


class _Batch:
    """Checked prompts that run together, as many at a time as the engine takes."""

    def __init__(self, generator: TextGenerator, requests: Sequence[_Item]):
        self._generator = generator
        self._requests = requests
        self._waiting = deque(range(len(requests)))
        self._live: dict[int, Generation] = {}
        self._pieces: list[list[GenerationOutput]] = [[] for _ in requests]
        self._news: queue.SimpleQueue[tuple[int, GenerationOutput]] = queue.SimpleQueue()

    def run(self) -> list[RequestOutput]:
        """Submits everything, waits for everything; an error or Ctrl-C cancels what still runs."""
        try:
            self._submit()
            while self._waiting or self._live:
                try:
                    index, piece = self._news.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    for generation in self._live.values():
                        _check_alive(generation)
                    self._submit()
                    continue
                self._pieces[index].append(piece)
                if piece.finish_reason is not None:
                    _check_completed(piece, self._live.pop(index))
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
        self._news.put((index, piece))

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
        )


def open_engine(deployment: Deployment, **options: Any) -> "Engine":
    """A running engine on the devices of this process; `options` as `build_engine` takes them.

    Raises:
      ConfigError, CheckpointError: the layout or the model does not fit.
    """
    # Only now: these imports load JAX.
    from jaxserve.cluster.bootstrap import ProcessArguments, initialise
    from jaxserve.engine.build import build_engine

    initialise(ProcessArguments(), deployment)
    engine = build_engine(deployment, **options)
    if engine.status == "starting":
        engine.start()
    return engine


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], Integral):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError("params", f"{len(params)} of them for {count} prompts")
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
