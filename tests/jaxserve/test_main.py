import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxserve.__main__ import main
from jaxserve.commands.names import COMMANDS
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS, deployment_names
from jaxserve.errors import ConfigError
from tests import golden
from tests.jaxserve.fleet.launched import output_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("", 0, [f"  {name} " for name in COMMANDS]),
        ("--version", 0, ["jaxserve 0.1.0\n"]),
        ("sevre", 2, ["there is no command 'sevre'"]),
        ("serve --config nothing --check", 2, [", demo, demo-fleet, "]),
    ],
)
def test_commands_and_what_they_are_given(arguments, code, said, capsys):
    assert main(arguments.split()) == code
    output, error = capsys.readouterr()
    assert all(text in (error if code else output) for text in said)


@pytest.mark.parametrize(("command", "room"), [("convert", "checkpoint"), ("generate", "text")])
def test_wrong_arguments(command, room, capsys):
    def said(arguments: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            main([command, *arguments.split()])
        return capsys.readouterr().err.splitlines()[-1]

    golden.check_each(f"{room}/{command}_arguments.txt", said)


def test_completion_of_commands_options_names_and_files(tmp_path):
    """In the shell itself."""
    script = tmp_path / "jaxserve.bash"
    (tmp_path / "demonstration").mkdir()
    (tmp_path / "decoded.yaml").touch()
    command = [sys.executable, "-m", "jaxserve", "completion", "bash"]
    with script.open("w") as file:
        subprocess.run(command, stdout=file, cwd=ROOT, check=True, timeout=120)
    asked = {
        "plan cal": ["calibrate"],
        "serve --mod": ["--model"],
        "serve --model de": ["demonstration"],
        "serve --config de": [
            *("deepseek-v3", "deepseek-v3-v7x", "demo", "demo-fleet", "demo-fleet-afd"),
            *("decoded.yaml", "demonstration"),
        ],
        "launch --hardware v6": ["v6e"],
        "generate --set cache.page": ["cache.page_size=", "cache.pages="],
        "convert dem": ["demonstration"],
        "convert --weights int": ["int8", "int4"],
    }
    lines = [f"source {script}"]
    for words in asked:
        lines.append(f"COMP_WORDS=(jaxserve {words}); COMP_CWORD={len(words.split())}")
        lines.append('_jaxserve_without_space; echo "${COMPREPLY[@]}"')
    run = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    found = [line.split() for line in run.stdout.splitlines()]
    assert list(map(sorted, found)) == list(map(sorted, asked.values()))


def test_a_deployment_by_name_is_the_one_that_comes_with_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "demo" in deployment_names()
    by_path = load_deployment(CONFIGS / "demo.yaml")
    assert load_deployment("demo") == by_path
    assert load_deployment("configs/demo.yaml") == by_path
    with pytest.raises(ConfigError, match="by name there are"):
        load_deployment("elsewhere/demo.yaml")
    (tmp_path / "demo").mkdir()
    assert load_deployment("demo").model == str(tmp_path / "demo")


@pytest.mark.nightly
def test_the_wheel_works_without_the_repository(tmp_path):
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__", ".*")
    shutil.copytree(ROOT, tree, ignore=left_out)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", tmp_path, tree], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    installed = tmp_path / "installed"
    names = {str(path.relative_to(installed)) for path in installed.rglob("*")}
    assert {"jaxserve/configs/demo.yaml", "jaxserve/configs/demo/model.safetensors"} <= names
    assert not any(name.startswith(("tests", "configs", "launch")) for name in names)
    environment = {"PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}
    generate = ["-m", "jaxserve", "generate", "--config", "demo", "--prompt", "def fibonacci(n):"]
    generate += ["--max-tokens", "4", "--temperature", "0"]
    assert output_of(*generate, cwd=tmp_path, timeout=300, **environment).strip()
