"""Logits and tokens are the reference implementation's, for every model of the catalogue.

The reference is transformers: its results lie in `tests/reference/golden/`, and `pytest -m hf` runs
it again where it is installed, on random variations too; `-m nightly` compares those with NumPy
models. FP32: logits to 1e-4, greedy tokens equal. Step-3, which transformers does not have, is
compared in `test_model.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from jaxserve.config.attention.mla import MLA
from jaxserve.config.load import load_deployment
from jaxserve.config.model import Expansion
from jaxserve.engine.request import SamplingParams
from jaxserve.engine.runtime import Runtime, warm_up
from jaxserve.fleet.assembly import build_runtime
from jaxserve.llm import LLM
from jaxserve.model.attention import kv_cache
from pallas_kernels.attention import expanded
from tests import golden
from tests.jaxserve import layouts, long_prompts
from tests.jaxserve.stepping import Sequences
from tests.reference import make_golden, tiny_deepseek_v4, tiny_qwen3_next
from tests.reference.catalogue import CATALOGUE, random_model
from tests.reference.decoder_numpy import DecoderNumpy
from tests.reference.tiny_models import TinyModel, prompts

pytestmark = pytest.mark.unoptimised

TOLERANCE = 1e-4
PROMPTS = prompts()
GREEDY = SamplingParams(max_tokens=make_golden.OUTPUT_TOKENS, temperature=0, ignore_eos=True)

LIMITS: dict[str, Any] = golden.sizes("parity")
"""One bucket, which all prompts together fill but for one token."""

COLOCATED = LIMITS | {"mode": "colocated"}

CHUNKED = LIMITS | {"scheduler.token_budget": 16, "scheduler.token_buckets": [16]}
"""The scheduler cuts the longest prompt into chunks."""

LONG = COLOCATED | {
    "cache.pages": 80,
    "scheduler.max_length": 192,
    "scheduler.token_budget": 96,
    "scheduler.token_buckets": [96],
    "scheduler.page_buckets": [24],
}

TABLES = yaml.safe_load(golden.text("reference/parity.yaml"))
AFD: dict[str, dict[str, Any]] = TABLES["afd"]
"""2A2F for every family; those with biases on devices that must not add them twice."""

SHOWN_BY_ANOTHER: dict[str, str] = TABLES["shown_by_another"]
"""Models with nothing that the models and tests beside them do not show. Each costs a compilation,
so only `pytest -m nightly` runs them."""

RANDOM_MODELS = 16


class Expected(NamedTuple):
    """The reference's results for `PROMPTS`."""

    logits: list[np.ndarray]
    """After every token of each prompt."""
    tokens: list[list[int]]

    @classmethod
    def golden(cls, name: str) -> "Expected":
        stored = load_file(make_golden.GOLDEN / f"{name}.safetensors")
        ends = np.cumsum([len(prompt) for prompt in PROMPTS])
        return cls(np.split(stored["logits"], ends[:-1]), stored["tokens"].tolist())

    @classmethod
    def numpy(cls, folder: Path) -> "Expected":
        model = DecoderNumpy.from_folder(folder)
        return cls(
            [model.logits(prompt) for prompt in PROMPTS],
            [model.greedy(prompt, make_golden.OUTPUT_TOKENS) for prompt in PROMPTS],
        )

    @classmethod
    def live(cls, model: TinyModel) -> "Expected":
        reference = make_golden.run_transformers(model, PROMPTS)
        return cls(
            [rows[: len(p)] for rows, p in zip(reference.logits, PROMPTS, strict=True)],
            reference.tokens,
        )


def load(model: TinyModel, folder: Path, overrides: dict[str, Any]) -> Runtime:
    """A warm runtime of a model of the catalogue."""
    runtime = build_runtime(load_deployment(model.write(folder), overrides))
    warm_up(runtime)
    return runtime


def check_logits(runtime: Runtime, expected: Expected, chunk: int) -> None:
    """Prompts fed in chunks of so many tokens have the reference's logits after each chunk."""
    for index, rows in enumerate(Sequences(runtime, PROMPTS).in_chunks(chunk)):
        positions, last = list(rows), len(PROMPTS[index]) - 1
        assert positions == [*range(chunk - 1, last, chunk), last]
        np.testing.assert_allclose(
            np.stack(list(rows.values())),
            expected.logits[index][positions],
            rtol=0,
            atol=TOLERANCE,
            err_msg=f"prompt {index}, after the tokens {positions}",
        )


def greedy_tokens(runtime: Runtime) -> list[list[int]]:
    """Tokens of an engine around the runtime, all prompts at once."""
    with layouts.serving(runtime) as engine:
        return layouts.generate(engine, PROMPTS, GREEDY)


def check_everything(runtime: Runtime, expected: Expected) -> None:
    """Prefill at once, in chunks and token by token; and greedy tokens."""
    for chunk in (40, 7, 1):
        check_logits(runtime, expected, chunk)
    assert greedy_tokens(runtime) == expected.tokens


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.nightly] if name in SHOWN_BY_ANOTHER else [])
        for name in CATALOGUE
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def runtime(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    return load(CATALOGUE[name], tmp_path_factory.mktemp(name), COLOCATED)


class TestColocated:
    @pytest.mark.parametrize("chunk", [40, 16, 7, 1])
    def test_prefill_at_once_in_chunks_and_by_token(self, runtime, name, chunk):
        check_logits(runtime, Expected.golden(name), chunk)

    def test_greedy(self, runtime, name):
        assert greedy_tokens(runtime) == Expected.golden(name).tokens


def llm_tokens(folder: Path, overrides: dict[str, Any]) -> list[list[int]]:
    """Tokens of the Python face."""
    with LLM(folder, overrides={"mode": "afd", "pipeline": "layer"} | overrides) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("name", AFD)
def test_greedy_on_two_meshes(name, tmp_path):
    folder = CATALOGUE[name].write(tmp_path, shards=2)
    assert llm_tokens(folder, CHUNKED | AFD[name]) == Expected.golden(name).tokens


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("minimax_m2", "colocated"), ("glm4_moe", "colocated"), ("kimi_k2", "colocated")),
        *(("deepseek_v32", "afd"), ("glm_moe_dsa", "colocated")),
        *(("step3p5", "afd"), ("gpt_oss", "afd")),
    ],
)
def test_prompts_that_lose_their_pages_or_find_them_in_the_cache(name, mode, tmp_path, monkeypatch):
    """Pages on two meshes go to host memory, with two pages of a window where there is one. Latents
    are expanded for chunks of three tokens and more, eight positions at a time."""
    for constant, value in {"EXPANDED_PAGE": 4, "EXPANDED_POSITIONS": 8}.items():
        monkeypatch.setattr(expanded, constant, value)
    monkeypatch.setattr(MLA, "expansion", Expansion(3, 0, 0))
    few = CHUNKED | {"mode": mode, "cache.pages": 24, "cache.host_gb": 0.1 * (mode == "afd")}
    few |= {"cache.page_size": 4, "scheduler.page_buckets": [16], "pipeline": "layer"}
    expected = Expected.golden(name).tokens
    with LLM(CATALOGUE[name].write(tmp_path), overrides=few) as llm:
        for _ in range(2):
            assert [made.token_ids for made in llm.generate(PROMPTS, GREEDY)] == expected
        load = llm._engine.load()
    assert load.preemptions > 0
    assert load.domains[0].prefix_hits > 0
    assert (load.host_pages.get("hits", 0) > 0) == (mode == "afd")


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["2A4F", "3A2F"])
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_model_on_two_meshes(name, layout, tmp_path):
    folder = CATALOGUE[name].write(tmp_path)
    overrides = CHUNKED | layouts.LAYOUTS[layout] | {"lanes": 2}
    assert llm_tokens(folder, overrides) == Expected.golden(name).tokens


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("spare", [False, True], ids=["rows", "rows as on TPUs"])
def test_an_indexer_chooses_24_of_more_than_a_hundred_tokens(name, spare, tmp_path, monkeypatch):
    """On TPUs rows have spare columns."""
    if spare:
        entries, on_tpus = kv_cache.layer_entries, partial(msgspec.structs.replace, platform="tpu")
        monkeypatch.setattr(kv_cache, "layer_entries", lambda c, *of: entries(on_tpus(c), *of))
    sizes = replace(CATALOGUE[name].sizes, index_topk=24)
    runtime = load(replace(CATALOGUE[name], sizes=sizes), tmp_path, LONG)
    reference, texts = DecoderNumpy.from_folder(tmp_path), prompts((110, 131), seed=3)
    for index, rows in enumerate(Sequences(runtime, texts).in_chunks(32)):
        expected = reference.logits(texts[index])[list(rows)]
        np.testing.assert_allclose(np.stack([*rows.values()]), expected, rtol=0, atol=TOLERANCE)
    with layouts.serving(runtime) as engine:
        found = layouts.generate(engine, texts, GREEDY)
    assert found == [reference.greedy(text, make_golden.OUTPUT_TOKENS) for text in texts]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(RANDOM_MODELS))
def test_random_variation(seed, tmp_path):
    runtime = load(random_model(seed), tmp_path, COLOCATED)
    check_everything(runtime, Expected.numpy(tmp_path))


def rewritten(model: TinyModel, folder: Path) -> Path:
    """The model's folder as `save_pretrained` of transformers writes it."""
    network = make_golden.load_transformers(model.write(folder / "ours"), model)
    network.save_pretrained(folder / "theirs")
    return folder / "theirs"


@pytest.mark.hf
@pytest.mark.skipif(
    not (find_spec("torch") and find_spec("transformers")),
    reason="torch and transformers are not both installed",
)
@pytest.mark.filterwarnings("default")
class TestLiveTransformers:
    """The comparison with transformers as it is installed here."""

    @pytest.mark.parametrize("name", CATALOGUE)
    def test_golden_files(self, name):
        golden, live = Expected.golden(name), Expected.live(CATALOGUE[name])
        assert live.tokens == golden.tokens
        for rows, expected in zip(live.logits, golden.logits, strict=True):
            np.testing.assert_allclose(rows, expected, rtol=0, atol=2e-5)

    @pytest.mark.parametrize("name", TABLES["written_by_transformers"])
    def test_folder_that_transformers_writes(self, name, tmp_path):
        """Modules for predictions are left out, but not their number in config.json."""
        folder = rewritten(CATALOGUE[name], tmp_path)
        check_everything(build_runtime(load_deployment(folder, COLOCATED)), Expected.golden(name))

    @pytest.mark.parametrize(
        "tiny", [tiny_deepseek_v4, tiny_qwen3_next], ids=["deepseek_v4", "qwen3_next"]
    )
    def test_folders_of_models_with_long_prompts(self, tiny, tmp_path):
        for recorded in tiny.RECORDED:
            folder = rewritten(recorded.model, tmp_path / recorded.model.name)
            loaded = long_prompts.loaded(folder, tiny.ENTRIES["limits"])
            long_prompts.check_logits(loaded, recorded, 20)

    @pytest.mark.parametrize("seed", range(RANDOM_MODELS))
    def test_random_variation(self, seed, tmp_path):
        model, _ = make_golden.find_seed(random_model(seed), varied=False)
        check_everything(load(model, tmp_path, COLOCATED), Expected.live(model))
