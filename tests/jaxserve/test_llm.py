import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from jaxserve.engine.request import SamplingParams
from jaxserve.errors import (
    CheckpointError,
    ConfigError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
)
from jaxserve.llm import LLM, RequestOutput
from tests import golden
from tests.conftest import REPOSITORY
from tests.jaxserve.fleet.launched import output_of
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import ids_of, write_letters
from tests.jaxserve.waiting import until


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    """Engine that `LLM` builds instead of a real one."""
    engine = FakeEngine(ids_of("one two three"))
    monkeypatch.setattr("jaxserve.fleet.devices.initialise", lambda *_: None)
    monkeypatch.setattr("jaxserve.fleet.here.open_engine", lambda *_, **__: engine)
    yield engine
    engine.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    return write_letters(tmp_path)


@pytest.fixture
def llm(engine: FakeEngine, folder: Path) -> Iterator[LLM]:
    with LLM(folder, overrides={"lanes": 2}) as llm:
        yield llm


ANSWER = {
    "text": "one two three",
    "token_ids": ids_of("one two three"),
    "finish_reason": "stop",
    "stop_token_id": 1,
}


def test_a_single_prompt(llm: LLM) -> None:
    ids = [0, *ids_of("hi")]
    assert llm.generate("hi") == [RequestOutput(prompt="hi", prompt_token_ids=ids, **ANSWER)]
    assert llm.generate([]) == []
    assert llm.deployment.lanes == 2


def test_log_probabilities_come_with_the_tokens(llm: LLM) -> None:
    asked = [SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=0), SamplingParams()]
    scored, other = llm.generate(["hi", "hi"], asked)
    assert [one.token_id for one in scored.logprobs] == scored.token_ids == ids_of("one ")
    first = ids_of("o")[0]
    assert scored.logprobs[0] == (first, -first / 100, ((first, -first / 100),))
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert [one.token_id for one in scored.prompt_logprobs[1:] if one] == ids_of("hi")
    assert (other.logprobs, other.prompt_logprobs) == ([], None)


def test_texts_and_token_ids_in_their_order(llm: LLM, engine: FakeEngine) -> None:
    params = [SamplingParams(max_tokens=n) for n in (5, 1, 3)]
    outputs = llm.generate(["a", [7, 8], "b"], params)
    assert [output.text for output in outputs] == ["one t", "o", "one"]
    assert [output.prompt for output in outputs] == ["a", None, "b"]
    assert engine.prompts == [[0, *ids_of("a")], [7, 8], [0, *ids_of("b")]]
    assert [output.prompt_token_ids for output in outputs] == engine.prompts
    assert {output.finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize("prompt", [[7, 8], (7, 8), [np.int32(7), np.int64(8)]])
def test_one_prompt_of_token_ids(llm: LLM, prompt: list[int]) -> None:
    (output,) = llm.generate(prompt, SamplingParams(stop=("two",)))
    assert output.prompt_token_ids == [7, 8]
    assert (output.text, output.stop_string) == ("one ", "two")


def test_a_bad_prompt_stops_all_before_any_is_submitted(llm, engine):
    golden.check_arguments("text/bad_prompts.txt", InvalidRequestError, llm.generate, globals())
    assert engine.prompts == []


def test_more_prompts_than_the_engine_takes(llm: LLM, engine: FakeEngine) -> None:
    submit = engine.submit

    def crowded(*args, **kwargs):  # type: ignore[no-untyped-def]
        if engine.running >= 3:
            raise OverloadedError("3 wait already")
        return submit(*args, **kwargs)

    engine.submit = crowded  # type: ignore[method-assign]
    outputs = llm.generate([[i] for i in range(20)], SamplingParams(max_tokens=3))
    assert [output.text for output in outputs] == ["one"] * 20
    assert engine.prompts == [[i] for i in range(20)]


def once_running(engine: FakeEngine, call: Callable[[], object]) -> None:
    """Calls from another thread, once a request runs."""
    threading.Thread(target=lambda: (until(lambda: engine.running), call())).start()


def test_a_failing_engine_ends_the_call(llm: LLM, engine: FakeEngine) -> None:
    engine.allowed = 3
    once_running(engine, lambda: engine.fail("process 1 is gone"))
    with pytest.raises(EngineFailedError, match="process 1 is gone"):
        llm.generate(["a", "b"])


def test_an_interrupted_call_cancels_its_requests(llm, engine, monkeypatch):
    engine.allowed = 3

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxserve.llm.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("jaxserve.llm._check_alive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"])
    assert engine.wait_until_idle()


def test_streaming(llm: LLM, engine: FakeEngine) -> None:
    """Nothing is submitted before the first piece is asked for."""
    stream = llm.stream("hi", SamplingParams(max_tokens=7))
    assert engine.prompts == []
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == "one two"
    assert pieces[-1].finish_reason == "length"
    assert pieces[-1].completion_token_count == 7


def test_leaving_a_stream_cancels_it(llm: LLM, engine: FakeEngine) -> None:
    """A bad prompt raises before the stream is read."""
    with pytest.raises(InvalidRequestError, match="prompt: is empty"):
        llm.stream("")
    engine.allowed = 3
    for piece in llm.stream("hi"):
        assert piece.text.startswith("o")  # and what had come by then
        break
    assert engine.wait_until_idle()


def test_closing_from_another_thread_ends_a_call(llm: LLM, engine: FakeEngine) -> None:
    engine.allowed = 3
    once_running(engine, llm.close)
    with pytest.raises(EngineFailedError, match="closed"):
        llm.generate("hi")


def test_errors_of_construction(engine: FakeEngine, tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"deployment file .*nowhere"):
        LLM(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"did you mean 'attention\.dp'"):
        LLM(folder, overrides={"attention.dpp": 2})
    with LLM(folder) as llm:
        with pytest.raises(ConfigError, match="a Deployment is complete"):
            LLM(llm.deployment, overrides={"lanes": 2})
    (folder / "config.json").write_text('{"vocab_size": 257}')
    with pytest.raises(CheckpointError, match="ids go up to 257, but vocab_size = 257 in config"):
        LLM(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no file tokenizer\.json"):
        LLM(folder)


def test_token_ids_alone_where_there_is_no_tokenizer(engine: FakeEngine, folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "model.safetensors")
    with LLM(folder) as llm:
        output = llm.generate([5, 6, 7])[0]
        assert (output.text, output.token_ids) == ("", ids_of("one two three"))
        with pytest.raises(InvalidRequestError, match="prompt: the model folder has no tokenizer"):
            llm.generate("hi")
        with pytest.raises(InvalidRequestError, match=r"stop: .* stop_token_ids to end at"):
            llm.generate([5], SamplingParams(stop=("a",)))
        before = list(engine.prompts)
        with pytest.raises(InvalidRequestError, match=r"prompts\[1\]\.stop: "):
            llm.generate([[5], [6]], [SamplingParams(), SamplingParams(stop=("a",))])
        assert engine.prompts == before
        with pytest.raises(InvalidRequestError, match=r"messages: .* no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])


TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}{% if enable_thinking is false %}!{% endif %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]
TURNS = [{"role": "system", "content": "x"}, *HI, {"role": "assistant", "content": "Ho"}, *HI]


@pytest.fixture
def chatty(folder: Path, llm: LLM) -> LLM:
    """A model whose template writes bos, and whose tokenizer would add it too."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return llm


def test_a_conversation(chatty: LLM) -> None:
    prompt, ids = "<s>u:Hi;a:", [0, *ids_of("u:Hi;a:")]
    assert chatty.chat(HI) == [RequestOutput(prompt=prompt, prompt_token_ids=ids, **ANSWER)]
    pieces = chatty.stream(chatty.chat_prompt(HI), SamplingParams(max_tokens=3))
    assert "".join(piece.text for piece in pieces) == "one"


def test_several_conversations_with_their_own_parameters(chatty: LLM) -> None:
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5)]
    outputs = chatty.chat([HI, TURNS], params)
    assert [output.prompt for output in outputs] == ["<s>u:Hi;a:", "<s>s:x;u:Hi;a:Ho;u:Hi;a:"]
    assert [output.text for output in outputs] == ["one", "one t"]
    assert all(output.prompt_token_ids.count(0) == 1 for output in outputs)


def test_tools_switches_and_going_on(chatty: LLM) -> None:
    (output,) = chatty.chat(
        HI,
        SamplingParams(max_tokens=1),
        tools=[{"name": "f"}, {"name": "g"}],
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert output.prompt == "<s>u:Hi;2!"


def test_a_template_without_bos_gets_none(folder: Path, llm: LLM) -> None:
    """The tokenizer's bos is for texts; a template says all that it wants."""
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (output,) = llm.chat(HI)
    assert output.prompt_token_ids == ids_of("Hi")
    assert llm.generate("Hi")[0].prompt_token_ids == [0, *ids_of("Hi")]


def test_a_bad_conversation_stops_all_before_any_is_submitted(chatty, engine):
    golden.check_arguments(
        "text/bad_conversations.txt", InvalidRequestError, chatty.chat, globals()
    )
    assert engine.prompts == []


def test_a_model_without_a_template_says_so(llm: LLM, folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=f"^messages: {folder.name} has no chat templ"):
        llm.chat(HI)


def test_a_broken_template_is_met_by_chats_alone(llm: LLM, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert llm.generate("Hi", SamplingParams(max_tokens=3))[0].text == "one"
    with pytest.raises(CheckpointError, match="default: line 1: Expected an expression"):
        llm.chat(HI)


def test_one_that_the_engine_refuses_keeps_the_others_from_it(chatty, engine, monkeypatch):
    def check(prompt: list[int], params: SamplingParams) -> None:
        if params.max_tokens == 9:
            raise InvalidRequestError("max_tokens", "take 9 pages")

    monkeypatch.setattr(engine, "check", check)
    several = [SamplingParams(), SamplingParams(max_tokens=9)]
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\].max_tokens: take 9 pages"):
        chatty.generate(["a", "b"], several)
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\].max_tokens: take 9 pages"):
        chatty.chat([HI, HI], several)
    with pytest.raises(InvalidRequestError, match=r"^max_tokens: take 9 pages"):
        chatty.chat(HI, several[1])
    assert engine.prompts == []


def test_two_requests_do_not_share_a_grammar(chatty: LLM, engine: FakeEngine) -> None:
    grammar = Mock(spec=["mask", "accept", "finished"])
    own = [SamplingParams(grammar=grammar, max_tokens=n) for n in (1, 2)]
    for several in (own[0], own):
        for method, prompts in ((chatty.generate, ["a", "b"]), (chatty.chat, [HI, HI])):
            with pytest.raises(InvalidRequestError, match="params: several requests share a gram"):
                method(prompts, several)
    assert engine.prompts == []


TWO_MODELS = golden.text("engine/two_models.txt")


@pytest.mark.unoptimised
def test_a_closed_model_is_freed_and_one_that_was_not_closed_ends_cleanly(tiny_model: Path) -> None:
    """Also where a daemon thread is opening another when the interpreter ends."""
    environment = {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    said = output_of("-c", TWO_MODELS, str(tiny_model), timeout=240, **environment)
    opened, closed = map(int, said.split()[-2:])
    assert opened > 2_000_000
    assert closed < 20_000
