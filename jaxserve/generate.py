"""`python -m jaxserve.generate`: one prompt, its completion streamed to the terminal.

With `--config F` or `--model DIR` the model runs in this process; with `--server HOST:PORT` a
running `jaxserve.serve` answers. Only the completion goes to standard output. Exit codes: 1 it
failed, 2 something asked for is wrong, 130 Ctrl-C.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import grpc

from jaxserve.config.command_line import (
    add_deployment_arguments,
    add_options,
    check_timeline,
    read_deployment,
)
from jaxserve.engine.request import SamplingParams
from jaxserve.errors import CheckpointError, ConfigError, InvalidRequestError, JaxserveError
from jaxserve.fleet.sizing import Sizing
from jaxserve.llm import LLM
from jaxserve.observe import timeline_view
from jaxserve.observe.recorder import Recorder
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.rpc import InferenceStub

OPTIONAL = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
CHANNEL_OPTIONS = [
    # A server that vanished is noticed after half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]

Pieces = Generator[tuple[str, list[int], str]]
"""New text, its tokens, and in the last piece why it ended."""
Asked = str | list[int]
"""A prompt: its text, or its token ids."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a completion; returns the exit code."""
    options = _parse(arguments)
    try:
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        given = {name: value for name in OPTIONAL if (value := getattr(options, name)) is not None}
        given |= {"stop": tuple(options.stop), "ignore_eos": options.ignore_eos}
        asked = _token_ids(prompt) if options.tokens else prompt
        SamplingParams(**given).validate()  # before a model is loaded or a server asked
        source = _from_server if options.server else _from_model
        with contextlib.closing(source(options, asked, given)) as pieces:
            _print(pieces, options.tokens)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (ConfigError, CheckpointError, InvalidRequestError) as error:
        return _complain(str(error), 2)
    except JaxserveError as error:
        return _complain(str(error), 1)
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call):
            raise
        wrong = error.code() == grpc.StatusCode.INVALID_ARGUMENT
        return _complain(f"{error.code().name}: {error.details()}", 2 if wrong else 1)
    return 0


def _token_ids(text: str) -> list[int]:
    """The ids in a text, with blanks or commas between them."""
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isdecimal():
            raise InvalidRequestError("prompt", f"{word!r} is no token id (--tokens)")
    return [int(word) for word in words]


def _from_model(options: argparse.Namespace, prompt: Asked, given: dict[str, Any]) -> Pieces:
    sizing = Sizing(stages=bool(options.timeline))
    deployment = read_deployment(options.config, options.model, options.set, sizing)
    check_timeline(options.timeline, deployment)
    recorder = Recorder() if options.timeline else None
    with LLM(deployment, recorder=recorder) as llm:
        tokens = prompt
        if options.chat:
            system = [{"role": "system", "content": options.system}] if options.system else []
            tokens = llm.chat_prompt([*system, {"role": "user", "content": prompt}])
        for piece in llm.stream(tokens, SamplingParams(**given)):
            yield piece.text, piece.token_ids, piece.finish_reason or ""
    if recorder is not None:
        spans = recorder.ended()
        summary = timeline_view.write(options.timeline, spans)
        print(f"{options.timeline}: {timeline_view.describe(summary)}", file=sys.stderr)


def _from_server(options: argparse.Namespace, prompt: Asked, given: dict[str, Any]) -> Pieces:
    if isinstance(prompt, str):
        request = pb.GenerateRequest(text=prompt, **given)
    else:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **given)
    with grpc.insecure_channel(options.server, options=CHANNEL_OPTIONS) as channel:
        for event in InferenceStub(channel).GenerateStream(request):
            reason = ""
            if event.HasField("finish"):
                name = pb.FinishReason.Name(event.finish.reason)
                reason = name.removeprefix("FINISH_REASON_").lower()
            yield event.delta.text, list(event.delta.token_ids), reason


def _print(pieces: Pieces, as_tokens: bool) -> None:
    """Text, or token ids, to standard output as it comes, a line about it to standard error."""
    total, started, ended = 0, 0, ""
    first = time.monotonic()
    for text, tokens, reason in pieces:
        count = len(tokens)
        if count and not total:
            first, started = time.monotonic(), count
        total, ended = total + count, reason
        sys.stdout.write("".join(f"{token} " for token in tokens) if as_tokens else text)
        sys.stdout.flush()
    seconds = time.monotonic() - first
    print(flush=True)
    rate = f", {(total - started) / seconds:.1f} a second" if total > started else ""
    print(f"[{total} tokens{rate}, {ended}]", file=sys.stderr)


def _complain(message: str, code: int) -> int:
    print(f"jaxserve: {message}", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m jaxserve.generate", description="Complete one prompt."
    )
    add_deployment_arguments(made)
    add_options(made, Path(__file__).with_suffix(".yaml"))
    return made


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser()
    options = made.parse_args(arguments)
    here = options.config is not None or options.model is not None
    if here == (options.server is not None):
        made.error("give --server, or else --config or --model or both")
    if options.timeline and not here:
        made.error("--timeline: not with --server, whose stages run elsewhere")
    if options.chat and not here:
        made.error("--chat: not with --server, which takes finished prompts")
    if options.tokens and options.chat:
        made.error("--chat: not with --tokens, which are a finished prompt")
    if options.system is not None and not options.chat:
        made.error("--system: only with --chat")
    return options


if __name__ == "__main__":
    sys.exit(main())
