"""A model folder without a tokenizer, as `LLM` sizes it: its tokens are those of the NumPy model at
every size of step, and no step waits for a compilation."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxserve.engine.request import SamplingParams
from jaxserve.llm import LLM
from tests.jaxserve import layouts
from tests.jaxserve.waiting import until
from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_step3 import write_tiny_step3

pytestmark = pytest.mark.unoptimised


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of either kind: all steps are in one program each, which has every layer."""
    sizes = dataclasses.replace(layouts.SIZES, num_hidden_layers=2, moe_layers=(1,))
    return write_tiny_step3(tmp_path_factory.mktemp("model"), sizes, seed=layouts.SEED)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as llm:
        yield llm


def test_sizes(llm: LLM) -> None:
    deployment, limits = llm.deployment, llm.deployment.scheduler
    assert (deployment.mode, deployment.dtype) == ("colocated", "float32")
    assert limits.max_length == 2048
    assert limits.token_buckets == [1, 8, 32, 128, 512]
    assert limits.page_buckets == [128]
    assert deployment.cache.pages == 32 * 1024 // 16
    assert not llm.tokenizer.knows_text


def test_tokens_of_every_size_of_step(llm: LLM, folder: Path) -> None:
    """1, 5 and 12 sequences take steps of 1, 8 and 32 tokens; prompts take more. A request with
    options, one with a temperature of 0 among random ones, and a context of several blocks. All
    while most programs are compiled, and again afterwards, when no thread compiles."""
    draw, reference = random.Random(3), Step3Numpy.from_folder(folder)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    compiled: list[str] = []
    listener = lambda name, *_, **__: compiled.append(name)  # noqa: E731
    prompts = [[draw.randrange(161) for _ in range(n)] for n in (7, 150, 1, 30, 3, *[2] * 7)]
    expected = [reference.greedy(prompt, 6) for prompt in prompts]
    seeded = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
    penalised = SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, logit_bias={expected[0][0]: -100.0}
    )
    engine, mixed = llm._engine, []
    for all_compiled in (False, True):
        for count in (1, 2, 5, 12):
            outputs = llm.generate(prompts[:count], greedy)
            assert [output.token_ids for output in outputs] == expected[:count]
        engine.cancel(engine.submit(prompts[1], penalised, lambda output: None))
        outputs = llm.generate([*prompts[:2], prompts[0]], [greedy, seeded, penalised])
        mixed.append([output.token_ids for output in outputs])
        alone = llm.generate(prompts[1], seeded)[0].token_ids
        assert mixed[-1][:2] == [expected[0], alone]
        if not all_compiled:
            until(lambda: len(engine.driver.compiler.executables) == 5, 600)
            jax.monitoring.register_event_duration_secs_listener(listener)
    jax.monitoring.unregister_event_duration_listener(listener)
    assert mixed[0] == mixed[1]
    assert mixed[0][2][0] != expected[0][0]
    assert engine.compilations_after_ready == 0
    assert not [name for name in compiled if "backend_compile" in name]
