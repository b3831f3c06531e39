"""The README names only what exists, and its configuration reference is the configuration."""

import importlib.util
import re
from pathlib import Path

import msgspec
import pytest

from jaxserve.config.deployment import Deployment, known_keys

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
PATH = re.compile(r"(?:[\w.-]+/)+(?:[\w.-]+\.[a-z]+)?|[\w.-]+\.toml|LICENSE|Makefile")
PATHS = sorted({name for name in re.findall(r"`([^`\n]+)`", PROSE) if PATH.fullmatch(name)})
CONFIG_ROW = re.compile(r"^\| `([a-z_.]+)` \| (.*?) \| ", re.MULTILINE)


def defaults(struct: type[msgspec.Struct] = Deployment, prefix: str = "") -> dict[str, str]:
    """Dotted key → its default as the README writes it."""
    found = {}
    for field in msgspec.structs.fields(struct):
        key = f"{prefix}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found |= defaults(field.type, f"{key}.")
        elif field.required:
            found[key] = "required"
        else:
            made = field.default_factory is not msgspec.NODEFAULT
            value = field.default_factory() if made else field.default
            found[key] = f"`{value}`" if isinstance(value, str) else f"`{value!r}`"
    return found


@pytest.mark.parametrize("path", PATHS)
def test_a_path_in_backticks_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_life_of_a_token_names_files() -> None:
    life = PROSE.partition("## The life of a token")[2].partition("\n## ")[0]
    assert len([path for path in PATHS if f"`{path}`" in life]) > 20


def test_every_path_in_a_command_exists() -> None:
    commands = "\n".join(re.findall(r"```.*?```", README, flags=re.DOTALL))
    paths = set(re.findall(r"\b(?:configs|launch)/[\w./-]+", commands))
    assert paths >= {"configs/demo.yaml", "launch/local.py"}
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m (jaxserve\.\w+)", README))))
def test_a_module_in_a_command_exists(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z]+)\b[` ]", README))))
def test_a_make_target_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_configuration_reference_has_every_key_with_its_default_and_no_other() -> None:
    table = PROSE.partition("## Configuration")[2].partition("\n## ")[0]
    assert dict(CONFIG_ROW.findall(table)) == defaults()


def test_every_override_in_an_example_is_a_key() -> None:
    used = set(re.findall(r"--set ([a-z_.]+)=", README.replace("--set key=value", "")))
    used |= set(re.findall(r'"([a-z_.]+)": ', README.partition("overrides={")[2].partition("}")[0]))
    assert used >= {"attention.dp", "lanes"}
    assert used <= set(known_keys())
