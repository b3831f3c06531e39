import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import generate
from jaxserve.config.sections import Server
from jaxserve.engine.request import SamplingParams
from jaxserve.server.grpc import GrpcServer
from jaxserve.text.generator import TextGenerator
from tests import golden
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import ids_of, raw_letters
from tests.jaxserve.text.test_generator import engine as engine
from tests.jaxserve.text.test_generator import generator as generator


@pytest.fixture
def address(generator: TextGenerator) -> Iterator[str]:
    """A server to ask."""
    server = GrpcServer(Server(grpc_port=0))
    address = server.start()
    server.open(generator)
    yield address
    server.stop(0)


@pytest.fixture
def folder(tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model to run in this process."""
    raw_letters().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("jaxserve.llm.open_here", lambda *_, **__: engine)
    return tmp_path


def test_a_server_completes(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--server", address, "--prompt", "hi"]) == 0
    output, error = capsys.readouterr()
    assert output == "one two three\n"
    assert error.startswith("[13 tokens")
    assert error.endswith("stop]\n")


def test_a_model_completes(folder, engine, capsys):
    arguments = ["--config", str(folder), "--prompt", "hi", "--max-tokens", "7", "--set", "lanes=2"]
    assert generate.main(arguments) == 0
    output, error = capsys.readouterr()
    assert output == "one two\n"
    assert error.startswith("[7 tokens")
    assert error.endswith("length]\n")
    assert engine.status == "closed"


def test_the_prompt_from_standard_input_and_every_parameter(address, engine, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a file"))
    sampling = "--temperature 0 --top-k 3 --top-p 0.5 --min-p 0.1 --seed 7 --stop tw --stop x"
    arguments = ["--server", address, "--prompt", "-", "--ignore-eos", *sampling.split()]
    assert generate.main(arguments) == 0
    assert engine.prompts == [[0, *ids_of("from a file")]]
    given = {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7}
    assert engine.params == [SamplingParams(**given, stop=("tw", "x"), ignore_eos=True)]


@golden.table("commands/wrong_generations.yaml")
def test_failures_end_in_one_line(address, capsys, arguments, code, message):
    assert generate.main(arguments.replace("ADDRESS", address).split()) == code
    error = capsys.readouterr().err
    assert error.startswith(f"jaxserve: {message}")
    assert error.count("\n") == 1


def test_a_timeline(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(folder), "--prompt", "hi", "--timeline", str(tmp_path / "t")]
    assert generate.main([*arguments, "--set", "mode=afd", "--set", "lanes=1"]) == 0
    assert f"{tmp_path / 't'}: " in capsys.readouterr().err
    assert (tmp_path / "t" / "timeline.json").is_file()
    assert generate.main([*arguments, "--set", "mode=colocated"]) == 2
    assert "--timeline: shows the stages of mode afd" in capsys.readouterr().err


def test_a_message_in_the_models_chat_template(folder, engine, capsys):
    (folder / "config.json").write_text("{}")
    arguments = ["--model", str(folder), "--prompt", "hi", "--chat", "--system", "Short."]
    template = "{% for m in messages %}{{ m.role }} {{ m.content }},{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    assert generate.main(arguments) == 0
    assert engine.prompts == [ids_of("system Short.,user hi,")]
    (folder / "chat_template.jinja").unlink()
    assert generate.main(arguments) == 2
    assert "has no chat template" in capsys.readouterr().err
