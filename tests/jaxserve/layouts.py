"""Comparison of every layout with a reference: one model, its prompts, the reference tokens, and
the verdict.

Used by `test_layouts.py` and by the runs with two processes. FP32 and greedy, every layout gives
the tokens of the colocated run; another token is allowed only where the two best logits of the
reference lie within `TIE` of each other, and what follows it is another text.
"""

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.sections import Server
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.engine.runtime import Runtime
from jaxserve.fleet.assembly import make_engine, open_engine
from jaxserve.server.http.server import HttpServer
from jaxserve.text.generator import TextGenerator
from tests import golden
from tests.jaxserve.text.letters import LETTERS
from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

TIE = 1e-4
"""Logits closer than this may change places."""

SIZES = TinyStep3(
    vocab_size=161,
    intermediate_size=98,
    moe_intermediate_size=33,
    share_expert_dim=42,
    moe_num_experts=7,
)
"""Nothing that a mesh axis cuts is a multiple of two, but heads and d_model, which must be."""

SEED = 18
"""Seed of the weights; with it the reference's best logit is always more than ten `TIE` ahead."""

OUTPUT_TOKENS = int(os.environ.get("LAYOUT_TOKENS", "32"))
"""Tokens after every prompt; four pages. `make matrix` asks for 64."""
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)

_LENGTHS = (1, 70, 2, 47, 24, 25, 23, 69, 48, 49, 13, 5, 1, 33, 60, 8, 9, 17)
"""1 to 70 tokens and around the edges of pages (8), chunks (24) and two chunks."""


def _prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(SIZES.vocab_size) for _ in range(length)] for length in _LENGTHS]


PROMPTS = _prompts()


def prompts_below(vocab: int) -> list[list[int]]:
    """`PROMPTS`, for a model whose vocabulary may be smaller."""
    return [[token % vocab for token in prompt] for prompt in PROMPTS]


LIMITS: dict[str, Any] = golden.sizes("layouts")
"""One bucket, so that a layout compiles few programs; longer prompts than 24 tokens are chunked."""

COLOCATED: dict[str, Any] = {"mode": "colocated"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "1A1F": {},
    "2A1F": {"attention.dp": 2},
    "1A2F ep": {"ffn.ep": 2},
    "1A2F tp": {"ffn.tp": 2},
    "3A2F": {"attention.dp": 3, "ffn.ep": 2},
    "2A4F": {"attention.tp": 2, "ffn.ep": 2, "ffn.tp": 2},
}

Exchange = Literal["gather", "alltoall"]
TransportKind = Literal["device_put", "ppermute"]


class Case(NamedTuple):
    """One point of the product."""

    layout: str
    lanes: int
    exchange: Exchange
    transport: TransportKind

    @property
    def overrides(self) -> dict[str, Any]:
        return LAYOUTS[self.layout] | {
            "lanes": self.lanes,
            "ffn.exchange": self.exchange,
            "link.transport": self.transport,
        }

    def __str__(self) -> str:
        return f"{self.layout}, {self.lanes} lanes, {self.exchange}, {self.transport}"


def matrix() -> list[Case]:
    """All 72 points: rows can be sent to the ranks of their experts where there are several."""
    factors = (LAYOUTS, (1, 2, 3, 4), ("gather", "alltoall"), ("device_put", "ppermute"))
    cases = (Case(*values) for values in itertools.product(*factors))
    return [case for case in cases if case.exchange == "gather" or "ffn.ep" in LAYOUTS[case.layout]]


SHOWN = Case("2A4F", 4, "alltoall", "device_put")
"""The case that `make test` compares. Other tests of `make test` have 1A1F
(`engine/test_serving_options.py`), 1A2F by `ffn.tp` (`test_families_layouts.py`), 3A2F in two
processes (`test_layouts_processes.py`), `ppermute` (`test_fuzz.py`) and `pull` (`fleet/`)."""


def write_model(folder: Path) -> Path:
    """The model folder that all of this is about."""
    return write_tiny_step3(folder, SIZES, seed=SEED)


def write_damaged_model(folder: Path, tensor: str, place: Any, value: float) -> Path:
    """The model folder with another value in one of its tensors."""
    file = write_model(folder) / "model.safetensors"
    tensors = load_file(file)
    tensors[tensor] = np.array(tensors[tensor])
    tensors[tensor][place] = value
    save_file(tensors, file)
    return folder


def deployment(model: Path, overrides: dict[str, Any]) -> Deployment:
    """A deployment of the model with `LIMITS`, of which `overrides` may change some."""
    return load_deployment(model, LIMITS | overrides)


@contextlib.contextmanager
def running(model: Path, overrides: dict[str, Any]) -> Iterator[Engine]:
    """An engine of such a deployment, started. It has to be idle at the end."""
    with _idle_at_the_end(open_engine(deployment(model, overrides))) as engine:
        yield engine


@contextlib.contextmanager
def serving(runtime: Runtime, eos_token_ids: frozenset[int] = frozenset()) -> Iterator[Engine]:
    """A started engine around a warm runtime. It has to be idle at the end."""
    engine = make_engine(runtime, eos_token_ids=eos_token_ids)
    engine.start()
    with _idle_at_the_end(engine):
        yield engine


@contextlib.contextmanager
def listening(runtime: Runtime) -> Iterator[str]:
    """The address of an HTTP server before an engine around a warm runtime."""
    with serving(runtime) as engine:
        generator, server = TextGenerator(engine, LETTERS), HttpServer(Server(http_port=0))
        address = server.start()
        server.open(generator)
        try:
            yield f"http://{address}"
        finally:
            server.stop(0)
            generator.close()


@contextlib.contextmanager
def _idle_at_the_end(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
        idle(engine)
    finally:
        engine.close()


class Output(NamedTuple):
    """Result of one request."""

    token_ids: list[int]
    """With the id that ended it, if one did."""
    finish_reason: str
    error: str | None = None


class Collector:
    """Gathers the outputs of several requests; `wait` has a deadline."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[TokenOutput]] = {}
        self._ended = threading.Condition()
        self._open: set[str] = set()

    def submit(
        self, engine: Engine, prompt: Sequence[int], params: SamplingParams, **options: Any
    ) -> str:
        """Submits a request whose outputs come here, or go to `on_output` that hands them on."""
        on_output = options.pop("on_output", self)
        request_id = options.pop("request_id", None) or f"request {len(self._outputs)}"
        self._outputs[request_id] = []
        self._open.add(request_id)
        try:
            return engine.submit(prompt, params, on_output, request_id=request_id, **options)
        except Exception:
            self._open.discard(request_id)
            raise

    def __call__(self, output: TokenOutput) -> None:
        with self._ended:
            assert output.request_id in self._open, f"news after the end: {output}"
            self._outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                self._open.remove(output.request_id)
            self._ended.notify_all()

    def wait(self, seconds: float = 240.0) -> dict[str, Output]:
        """All outputs, once every request has ended."""
        with self._ended:
            ended = self._ended.wait_for(lambda: not self._open, seconds)
            assert ended, f"not ended within {seconds} s: {sorted(self._open)}"
        return {request_id: self.output(request_id) for request_id in self._outputs}

    def wait_for_tokens(self, request_id: str, count: int, seconds: float = 60.0) -> None:
        """Until so many tokens of a request came."""
        with self._ended:
            assert self._ended.wait_for(
                lambda: len(self.output(request_id).token_ids) >= count, seconds
            )

    def wait_for_end(self, request_id: str, seconds: float = 60.0) -> None:
        """Until a request has ended."""
        with self._ended:
            assert self._ended.wait_for(lambda: request_id not in self._open, seconds)

    def outputs(self, request_id: str) -> list[TokenOutput]:
        """Everything that came so far."""
        return list(self._outputs[request_id])

    def output(self, request_id: str) -> Output:
        """Tokens received so far."""
        news = self._outputs[request_id]
        tokens = [token for output in news for token in output.token_ids]
        if not news:
            return Output(tokens, "")
        last = news[-1]
        if last.stop_token_id is not None:
            tokens.append(last.stop_token_id)
        return Output(tokens, last.finish_reason or "", last.error)


def ask(engine: Engine, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Output:
    """Result of one request."""
    collector = Collector()
    request_id = collector.submit(engine, prompt, params, **options)
    return collector.wait()[request_id]


def one_by_one(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, salt: str = "own"
) -> list[list[int]]:
    """The tokens that follow each prompt, computed alone and without a cached prefix."""
    salts = [replace(params, cache_salt=f"{salt} {number}") for number in range(len(prompts))]
    return [ask(engine, *each).token_ids for each in zip(prompts, salts, strict=True)]


def beside_cancels(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    dropped: Sequence[Sequence[int]],
    params: SamplingParams,
) -> list[list[int]]:
    """The tokens that follow prompts, while requests beside them are cancelled after a while."""
    collector = Collector()
    gone = [collector.submit(engine, prompt, params) for prompt in dropped]
    named = [collector.submit(engine, prompt, params) for prompt in prompts]
    collector.wait_for_tokens(gone[0], 3, 240.0)
    for name in gone:
        engine.cancel(name)
    made = collector.wait()
    return [made[name].token_ids for name in named]


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    params: SamplingParams = GREEDY,
    seconds: float = 240.0,
) -> list[list[int]]:
    """The tokens that follow the prompts, all submitted at once."""
    collector = Collector()
    for prompt in prompts:
        collector.submit(engine, prompt, params)
    outputs = list(collector.wait(seconds).values())
    bad = [output for output in outputs if output.finish_reason not in ("stop", "length")]
    assert not bad, bad
    return [output.token_ids for output in outputs]


def idle(engine: Engine, seconds: float = 30.0) -> None:
    """Waits until nothing of any request is left in the engine, then checks its books."""
    end = time.monotonic() + seconds
    while True:
        try:  # the engine's thread may be about to free the slot of the last request
            assert not any(scheduler.has_work for scheduler in engine.schedulers), "work left"
            for scheduler in engine.schedulers:
                scheduler.check_integrity()
                assert set(scheduler.kv_usage) == {0.0}
            return
        except (AssertionError, RuntimeError):
            if time.monotonic() > end:
                raise
            time.sleep(0.005)


class Reference(NamedTuple):
    """The colocated run's tokens, with how far the best logit lies above the second best."""

    tokens: list[list[int]]
    margins: list[list[float]]

    @classmethod
    def of(cls, model: Path, tokens: list[list[int]]) -> "Reference":
        """Margins of the tokens that a colocated run gave for `PROMPTS`, by the NumPy model.

        Raises:
          AssertionError: a token is not the NumPy model's best, nor within `TIE` of it.
        """
        numpy_model = Step3Numpy.from_folder(model)
        margins = []
        for prompt, output in zip(PROMPTS, tokens, strict=True):
            logits = numpy_model.logits(prompt + output)[len(prompt) - 1 : -1]
            second, best = np.sort(logits, axis=-1)[:, -2:].T
            chosen = logits[np.arange(len(output)), output]
            assert np.all(best - chosen <= TIE), "the colocated run is not the NumPy model"
            margins.append([float(margin) for margin in best - second])
        return cls(tokens, margins)

    @property
    def smallest_margin(self) -> float:
        return min(min(margins) for margins in self.margins)


class Difference(NamedTuple):
    """Where a prompt's tokens first differ from the reference."""

    prompt: int
    place: int
    token: int | None
    expected: int | None
    margin: float
    """The reference's margin there; infinite where the lengths differ."""

    @property
    def allowed(self) -> bool:
        return self.margin <= TIE


def differences(reference: Reference, tokens: Sequence[Sequence[int]]) -> list[Difference]:
    """The first difference of every prompt that has one."""
    found = []
    rows = zip(tokens, reference.tokens, reference.margins, strict=True)
    for prompt, (got, expected, margins) in enumerate(rows):
        for place, (a, b) in enumerate(itertools.zip_longest(got, expected)):
            if a != b:
                margin = margins[place] if None not in (a, b) else float("inf")
                found.append(Difference(prompt, place, a, b, margin))
                break
    return found


def check(reference: Reference, tokens: Sequence[Sequence[int]], case: object) -> None:
    """Fails at a difference that is not allowed, and prints the others."""
    found = differences(reference, tokens)
    print(f"{case}: {found}")
    assert all(difference.allowed for difference in found), f"{case}: {found}"
