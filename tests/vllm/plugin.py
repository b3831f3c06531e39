"""A pytest plugin under which vLLM's endpoint tests run against jaxserve's server.

`test_vllm.py` starts a pytest with it in vLLM's unpacked source. Their modules import vLLM, torch
and transformers at the top; what is not installed is imported as a stand-in that has every name and
means nothing, which suffices for tests that only talk to a server. `tests.utils`, where their
server fixture comes from, is this module's. What does not apply is deselected by the list in
`endpoint_tests.yaml`.
"""

import atexit
import functools
import importlib.abc
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import anthropic
import openai
import pytest
import yaml

from launch import second_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIST = HERE / "endpoint_tests.yaml"
ENTRYPOINTS = "tests/entrypoints/"
READY_SECONDS = 300

STAND_INS = frozenset(
    {"fastapi", "lm_eval", "psutil", "pybase64", "torch", "transformers", "vllm", "tblib"}
)
"""Packages that are not installed for these tests."""


class _Module(types.ModuleType):
    """Has every name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "envs":
            return types.SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)
        made = type(name, (), {}) if name[:1].isupper() else mock.MagicMock(name=name)
        setattr(self, name, made)
        return made


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the packages of STAND_INS, and the tests' modules that need them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = name.partition(".")[0] in STAND_INS or name in ("tests.conftest", "tests.v1")
        if not known and not name.startswith("tests.v1."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "vllm.version":
            module.__dict__.update(__version__=_version())
        if module.__name__ == "vllm.tokenizers":
            module.__dict__["get_tokenizer"] = _Tokenizer
        if module.__name__ == "vllm.config":
            module.__dict__["ModelConfig"] = _ModelConfig


@functools.cache
def _version() -> str:
    import jaxserve

    return jaxserve.__version__


@functools.cache
def _folder(name: str, *, thinks: bool = False) -> Path:
    """Folder of the model that is served under one of the tests' names."""
    if not name.startswith(("Qwen/", "HuggingFaceTB/")):
        return ROOT / "configs" / "demo"
    folder = ROOT / "build" / "vllm" / f"second{'-thinks' if thinks else ''}"
    return second_model.write(folder, thinks=thinks).parent


class _Tokenizer:
    """A model's tokenizer with the methods that the tests call."""

    def __init__(self, tokenizer_name: str) -> None:
        from jaxserve.text.tokenizer import Tokenizer

        self._tokenizer = Tokenizer.from_folder(_folder(tokenizer_name))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_bos=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(ids), special=not skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.decode([one]) for one in ids]


class _ModelConfig:
    """A model's configuration, as far as tests ask for it."""

    def __init__(self, model: str, **_options: Any) -> None:
        self.vocab_size = json.loads((_folder(model) / "config.json").read_text())["vocab_size"]

    def get_vocab_size(self) -> int:
        return int(self.vocab_size)


class _Server:
    """A process of jaxserve."""

    def __init__(self, settings: Sequence[str], deployment: Path):
        self._log = tempfile.NamedTemporaryFile(prefix="jaxserve-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "jaxserve.serve", "--config", str(deployment)]
        command += ["--set", "server.grpc_port=0"]
        for setting in settings:
            command += ["--set", setting]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "8"},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"\bhttp=(\S+)", line)
        if found is None:
            self.stop()
            raise RuntimeError(f"no server: {Path(self._log.name).read_text()[-2000:]}")
        self.address = found[1]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@functools.cache
def _server(settings: tuple[str, ...], folder: Path) -> _Server:
    written = folder / "serve.yaml"  # the demo has none
    server = _Server(settings, written if written.exists() else folder.with_suffix(".yaml"))
    atexit.register(server.stop)
    return server


@functools.cache
def _names() -> list[str]:
    """Names that the tests give their models: one server has all of them."""
    named: dict[str, None] = {}
    for file in _list()["files"]:
        text = Path(ENTRYPOINTS, file).read_text()
        for name in re.findall(r'^MODEL_NAME = "(.+)"', text, re.MULTILINE):
            named[name] = None
    return list(named)


class RemoteOpenAIServer:
    """A server of jaxserve, under the name and with the methods of vLLM's fixture."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_options: Any):
        arguments = list(vllm_serve_args)
        flags = {argument.partition("=")[0] for argument in arguments}
        names = [model] if model not in _names() else [model, *(set(_names()) - {model})]
        if "--served-model-name" in flags:
            names = [arguments[arguments.index("--served-model-name") + 1]]
        settings = ["server.http_port=0"]
        self.uds = None
        if "--uds" in flags:
            self.uds = arguments[arguments.index("--uds") + 1]
            settings = [f"server.http_socket={self.uds}"]
        if "--trust-request-chat-template" in flags:
            settings.append("server.request_templates=true")
        settings.append(f"server.model_names={json.dumps(sorted(names)[:16])}")
        if "--enable-server-load-tracking" in flags:
            model = "demo"  # its answers are long enough to be counted
        folder = _folder(model, thinks="--reasoning-parser" in flags)
        self._server = _server(tuple(settings), folder)
        self.host, _, port = self._server.address.rpartition(":")
        self.port = int(port) if port.isdigit() else None
        self.proc = self._server.process

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_error: object) -> None:
        """Servers are kept for other modules, up to the end."""

    @property
    def url_root(self) -> str:
        return (
            f"http://{self.uds.split('/')[-1]}" if self.uds else f"http://{self.host}:{self.port}"
        )

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/{'/'.join(part.strip('/') for part in parts if part)}"

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, **self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 120, **options}


def _install() -> None:
    sys.meta_path.insert(0, _StandIns())
    utils = _Module("tests.utils")
    utils.__dict__["RemoteOpenAIServer"] = RemoteOpenAIServer
    utils.__dict__["ROCM_EXTRA_ARGS"] = []
    for name in ("multi_gpu_only", "requires_fp8", "large_gpu_test"):
        utils.__dict__[name] = _unchanged
    sys.modules["tests.utils"] = utils


def _unchanged(*arguments: Any, **_options: Any) -> Any:
    """A decorator that does nothing, with or without arguments."""
    if len(arguments) == 1 and callable(arguments[0]):
        return arguments[0]
    return lambda function: function


@functools.cache
def _list() -> Any:
    return yaml.safe_load(LIST.read_text(encoding="utf-8"))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any of vLLM's modules is imported."""
    _install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the list says does not apply."""
    applies, not_ours = [], []
    seen: set[tuple[str, str]] = set()
    files = {item.nodeid.partition("::")[0].removeprefix(ENTRYPOINTS) for item in items}
    for item in items:
        file, _, name = item.nodeid.partition("::")
        file = file.removeprefix(ENTRYPOINTS)
        listed = _list()["files"][file] or {}
        reasons = [key for key in (name, name.partition("[")[0]) if key in listed]
        seen.update((file, key) for key in reasons)
        (not_ours if reasons else applies).append(item)
    stale = {(file, name) for file in files for name in _list()["files"][file] or {}} - seen
    if stale:
        raise pytest.UsageError(f"{LIST.name} names tests that are not there: {sorted(stale)}")
    config.hook.pytest_deselected(items=not_ours)
    items[:] = applies
