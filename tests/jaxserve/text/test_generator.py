import ast
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies

from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import DrainingError, EngineFailedError, InvalidRequestError, OverloadedError
from jaxserve.text.generator import TextGenerator
from jaxserve.text.output import GenerationOutput, merge
from tests import golden
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import LETTERS, ids_of
from tests.jaxserve.waiting import until


class Consumer:
    """Collects outputs; `wait()` returns them joined when the last one came."""

    def __init__(self):
        self.outputs = []
        self.ended = threading.Event()

    def __call__(self, output: GenerationOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.ended.set()

    def wait(self) -> GenerationOutput:
        assert self.ended.wait(10)
        return merge(self.outputs)


def submitted(generator, prompt="hi", **params):
    consumer = Consumer()
    return generator.submit(prompt, SamplingParams(**params), consumer), consumer


def result_of(generator, **params) -> GenerationOutput:
    return submitted(generator, **params)[1].wait()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(ids_of("one two three"))
    yield engine
    engine.close()


@pytest.fixture
def generator(engine: FakeEngine) -> Iterator[TextGenerator]:
    generator = TextGenerator(engine, LETTERS)
    yield generator
    generator.close()


def test_text_and_counts(engine, generator):
    consumer = Consumer()
    generation = generator.submit("hi", SamplingParams(), consumer, request_id="a")
    assert consumer.wait() == GenerationOutput(
        request_id="a",
        text="one two three",
        token_ids=ids_of("one two three"),
        finish_reason="stop",
        stop_token_id=1,
        prompt_token_count=3,
        completion_token_count=13,
    )
    assert engine.prompts == [[0, *ids_of("hi")]]
    assert len(generation.prompt) == 3
    assert generator.live == 0


@pytest.mark.parametrize("chunk", [1, 2, 7, 50])
def test_a_stop_string_ends_the_request(engine, generator, chunk):
    """Text is cut before it, tokens after it, whatever the engine's chunks; pages come back."""
    engine.chunk = chunk
    engine.script = ids_of("one two three" * 20)
    result = result_of(generator, max_tokens=1000, stop=("tw", " th"))
    assert (result.text, result.stop_string, result.finish_reason) == ("one ", "tw", "stop")
    assert result.stop_token_id is None
    assert result.token_ids == ids_of("one tw")
    assert result.completion_token_count == 6
    assert engine.wait_until_idle()


def test_min_tokens_holds_for_stop_strings(engine, generator):
    engine.script = ids_of("ababab")
    result = result_of(generator, stop=("a",), min_tokens=3, max_tokens=9)
    assert (result.text, result.token_ids) == ("ab", ids_of("aba"))


@given(strategies.text(alphabet="ab€", max_size=20), strategies.integers(1, 5))
def test_what_comes_out_does_not_depend_on_the_chunks(text, chunk):
    """Pure: the same tokens in other portions give the same text, ids and reason."""

    class NoEngine(FakeEngine):
        def __post_init__(self) -> None: ...

        def submit(self, prompt, params, on_output, *, request_id, deadline=None):  # type: ignore[no-untyped-def]
            ids = ids_of(text)
            for start in range(0, len(ids), chunk):
                on_output(TokenOutput(request_id=request_id, token_ids=ids[start : start + chunk]))
            on_output(TokenOutput(request_id=request_id, finish_reason="length"))

        def cancel(self, request_id: str) -> None: ...

        def add_failure_callback(self, callback) -> None:  # type: ignore[no-untyped-def]
            pass

    generator = TextGenerator(NoEngine([]), LETTERS)
    result = result_of(generator, stop=("bb", "a€a"))
    generator.close()
    ends = [text.find(stop) + len(stop) for stop in ("bb", "a€a") if stop in text]
    if ends:
        assert result.token_ids == ids_of(text[: min(ends)])
        assert result.text == text[: min(ends) - len(result.stop_string or "")]
    else:
        assert (result.text, result.finish_reason) == (text, "length")


def test_cancelling_returns_the_pages(engine, generator):
    engine.allowed = 3
    generation, consumer = submitted(generator)
    generation.cancel()
    assert consumer.wait().finish_reason == "cancelled"
    assert engine.wait_until_idle()
    generation.cancel()  # again is fine
    assert engine.cancelled == [generation.request_id]


def test_a_slow_reader_is_dropped(engine, generator):
    engine.script = ids_of("x" * 80)
    consumer = Consumer()
    generation = generator.submit("hi", SamplingParams(), consumer, max_pending_tokens=10)
    result = consumer.wait()
    assert result.finish_reason == "cancelled"
    assert result.error == "the reader is too slow: more than 10 tokens wait for it"
    assert generation.overflowed
    assert result.completion_token_count == 10
    assert engine.wait_until_idle()


def test_a_reader_that_keeps_up_is_not_dropped(engine, generator):
    engine.script = ids_of("x" * 80)
    engine.pace = 0.001
    ready = threading.Event()
    consumer = Consumer()

    def consume(output: GenerationOutput) -> None:
        ready.wait(5)
        generation.consumed(len(output.token_ids))
        consumer(output)

    generation = generator.submit("hi", SamplingParams(), consume, max_pending_tokens=70)
    ready.set()
    assert consumer.wait().finish_reason == "stop"


def test_a_consumer_that_raises_ends_its_request_alone(engine, generator, caplog):
    def broken(output: GenerationOutput) -> None:
        raise KeyError("mine")

    other = Consumer()
    engine.pace = 0.002
    generator.submit("hi", SamplingParams(), broken, request_id="broken")
    generator.submit("hi", SamplingParams(), other)
    assert other.wait().text == "one two three"
    assert engine.wait_until_idle()
    assert engine.cancelled == ["broken"]
    assert "request broken: its consumer failed" in caplog.text


def test_a_failed_engine_ends_everything(engine, generator):
    engine.allowed = 3
    _, consumer = submitted(generator)
    until(lambda: consumer.outputs)
    engine.fail("process 1 (ffn) is gone")
    result = consumer.wait()
    assert (result.finish_reason, result.error) == ("error", "process 1 (ffn) is gone")
    with pytest.raises(EngineFailedError, match="process 1"):
        generator.submit("hi", SamplingParams(), consumer)
    assert generator.live == 0


def test_closing_ends_what_is_live_and_takes_nothing_new(engine):
    engine.allowed = 3
    generator = TextGenerator(engine, LETTERS)
    _, consumer = submitted(generator)
    generator.close()
    assert consumer.wait().finish_reason == "cancelled"
    assert engine.wait_until_idle()
    with pytest.raises(DrainingError):
        generator.submit("hi", SamplingParams(), consumer)


def test_a_bad_prompt_reaches_no_engine(engine, generator):
    """`golden/text/wrong_prompts.txt` lists prompts."""

    def submit(prompt: str) -> None:
        submitted(generator, ast.literal_eval(prompt))

    golden.check_refused("text/wrong_prompts.txt", InvalidRequestError, submit)
    message = "prompt: 100000 characters are more than 100 tokens hold"
    with pytest.raises(InvalidRequestError, match=message):
        submitted(generator, "x" * 100_000)
    assert engine.prompts == []


def test_bad_parameters_and_ids(engine, generator):
    for bad in ("", "x" * 257, "a\nb", "ä"):
        with pytest.raises(InvalidRequestError, match="request_id: must be 1 to 256 printable"):
            generator.submit("hi", SamplingParams(), Consumer(), request_id=bad)
    with pytest.raises(InvalidRequestError, match="temperature"):
        submitted(generator, temperature=3)
    engine.allowed = 3
    generator.submit("hi", SamplingParams(), Consumer(), request_id="a")
    with pytest.raises(InvalidRequestError, match="request_id: 'a' is already running"):
        generator.submit("hi", SamplingParams(), Consumer(), request_id="a")


def test_a_refused_request_leaves_nothing_behind(engine, generator):
    engine.refusal = OverloadedError("8 wait already", retry_after_s=2)
    with pytest.raises(OverloadedError):
        generator.submit("hi", SamplingParams(), Consumer(), request_id="a")
    assert generator.live == 0
    engine.refusal = None
    consumer = Consumer()
    generator.submit("hi", SamplingParams(), consumer, request_id="a")
    assert consumer.wait().finish_reason == "stop"
