"""Steps of both roles as one program give the colocated tokens."""

import contextlib
import itertools
import random
from types import SimpleNamespace
from unittest.mock import patch

import jax
import msgspec
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.experimental import pallas

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.errors import ConfigError
from jaxserve.fleet.assembly import build_runtime
from pallas_kernels import target
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve.hand_offs import at_rest, hand_over, workers
from tests.jaxserve.layout_process import as_on_tpus, await_moves, crowded, move
from tests.jaxserve.test_layouts_processes import run
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import VOCAB, TinyDeepseek, TinyGptOss, TinyStep3p5
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

pytestmark = pytest.mark.unoptimised

WIDE = {"hidden_size": 128, "moe_intermediate_size": 256}
STEP3 = TinyStep3(vocab_size=161, share_expert_dim=42, head_dim=128, **WIDE)
OSS = TinyGptOss(hidden_size=128, intermediate_size=256, head_dim=128)
LATENT = TinyDeepseek(num_nextn_predict_layers=1, qk_nope_head_dim=128, **WIDE)
MODELS = {
    "step3": lambda folder: write_tiny_step3(folder, STEP3, seed=layouts.SEED),
    "gpt_oss": TinyModel("windows", OSS).write,
    "step3p5": TinyModel("layers that differ", TinyStep3p5(**WIDE)).write,
    "deepseek": TinyModel("whole tiles", LATENT).write,
}


@pytest.mark.nightly
@golden.table("roles/one_program.yaml", "multihost")
def test_the_tokens_are_the_colocated_ones(case, lanes, model, given, sizes, tiny_model, tmp_path):
    """Experts move while requests run, and in pools a step is lost meanwhile. With few pages
    requests are preempted and one is cancelled. Each of two pools has one of Step-3's two layers
    with experts, DeepSeek's one pool both. Half of gpt-oss's layers have a window, and most of
    Step-3.5's. Two processes have half of each role."""
    folder, prompts = tiny_model, layouts.PROMPTS
    platform = contextlib.nullcontext()
    if given:
        platform = with_kernels() if "kernels" in case else as_on_tpus()
        folder = MODELS[model](tmp_path)
        prompts = layouts.prompts_below(read_config(folder)[0].vocab)
    if "scheduler.max_length" in given:  # all outgrow a page
        prompts = [(99 * prompt)[: 100 + n] for n, prompt in enumerate(prompts[:9])]
    with layouts.running(folder, given | layouts.COLOCATED) as engine:
        expected = layouts.generate(engine, prompts)
    overrides = given | {"pipeline": "step", "lanes": lanes, "ffn.exchange": "gather"} | sizes
    if "ffn.processes" in sizes:
        arguments = "--as-on-tpus", "--crowded", "--moving"
        tokens, view, pages = run(folder, overrides, 2, tmp_path, *arguments)
        assert tokens == expected
        assert view["experts"]["moves"] > 20
        assert pages["hits"] > 0
        return
    with platform, layouts.running(folder, overrides) as engine:
        if "ffn.redundant_slots" in sizes:
            home, alike = dict(engine.experts.placements), "ffn.weights" not in given
            expected = expected if alike else layouts.generate(engine, prompts)
            move(engine, prompts, fails=False, expected=expected if alike else None)
            if given:
                with losing_a_step(engine):
                    experts = engine.experts
                    experts.place({n: own[::-1] for n, own in experts.placements.items()})
                    await_moves(engine, prompts, expected if alike else None)
            check_counts(engine, prompts)
            if not alike:
                engine.experts.place(home)
                await_moves(engine, prompts)
        generate = crowded if "cache.pages" in overrides else layouts.generate
        assert generate(engine, prompts) == expected
        assert layouts.generate(engine, prompts) == expected  # with cached prefixes
        assert engine.compilations_after_ready == 0
        assert not engine.host_pages or engine.host_pages["bytes_restored"] > 0


@contextlib.contextmanager
def with_kernels():
    """Programs are those of TPUs, whose kernels XLA interprets. At the end all have run."""
    names, call = set(), pallas.pallas_call
    there = target.Target("mosaic_tpu", "TPU v6 lite", interpret=True)

    def interpreted(kernel, *, name, interpret, **options):
        names.add(name)
        return call(kernel, interpret=bool(interpret), **options)

    jax.clear_caches()  # of functions that were traced without kernels
    chosen = patch.object(target, "target_of", return_value=there)
    with as_on_tpus(), chosen, patch.object(pallas, "pallas_call", interpreted):
        yield
    assert names >= {"paged_attention", "grouped_swiglu", "grouped_matmul", "combine_rows"}
    jax.clear_caches()


@contextlib.contextmanager
def losing_a_step(engine):
    """A step fails on the devices, and takes pages and experts along."""
    driver, before, steps = engine.driver, engine.driver.observer, itertools.count()

    def observe(*step):
        if next(steps) == 9:
            for array in driver._pages:
                array.delete()
            raise JaxRuntimeError("INTERNAL: a device lost its step")

    driver.observer = SimpleNamespace(observe=observe)
    yield
    driver.observer = before
    assert next(steps) > 9


@pytest.mark.nightly
def test_pages_of_pools_are_handed_over(tmp_path):
    """From pools to pools with pages of half the size, which have room for few sequences: pages go
    to host memory and come back, a request is cancelled, and a step is lost."""
    folder, draw = MODELS["step3"](tmp_path), random.Random(3)
    shared = [[draw.randrange(VOCAB) for _ in range(64)] for _ in "abc"]
    prompts = [[*shared[n % 3], *range(n, 5 * n)] for n in range(12)]
    with layouts.running(folder, layouts.COLOCATED) as engine:
        expected = layouts.generate(engine, prompts)
    step = {"mode": "afd", "pipeline": "step", "lanes": 2}
    first = step | {"attention.dp": 2, "ffn.ep": 2, "cache.page_size": 64}
    second = step | {"cache.page_size": 32, "cache.pages": 9, "cache.host_gb": 0.02}
    with as_on_tpus(), workers(folder, prefill=first, decode=second) as (source, domain):
        assert hand_over(source, domain, prompts, layouts.GREEDY) == expected
        with losing_a_step(domain):
            assert crowded(domain, prompts) == expected
        salted = msgspec.structs.replace(layouts.GREEDY, cache_salt="again")
        assert hand_over(source, domain, prompts, salted) == expected
        counters = domain.hand_offs.domains[0].client.counters
        assert (counters.transfers > 2, counters.failures) == (True, 0)
        assert domain.host_pages["bytes_restored"] > 0
        for engine in (source, domain):
            at_rest(engine)
            assert engine.compilations_after_ready == 0


def check_counts(engine, prompts):
    """Each rank counts tokens for the experts in its slots, and every layer all tokens; a module's
    passes leave out rejected drafts."""
    before = tokens_of_ranks(engine)
    layouts.generate(engine, prompts)
    totals = set()
    for layer, tokens in tokens_of_ranks(engine).items():
        slots = np.split(np.array(engine.experts.placements[layer]), len(tokens))
        for own, new in zip(slots, tokens - before[layer], strict=True):
            assert new.any()
            assert set(np.flatnonzero(new)) <= set(own)
        totals.add((tokens - before[layer]).sum())
    assert len(totals) <= 1 + engine.deployment.modules


def tokens_of_ranks(engine):
    engine.experts.rebalance(dry_run=True, seconds=60)
    return dict(engine.experts._totals)


def test_meshes_without_common_axes_are_refused(tiny_model):
    sizes = {"pipeline": "step", "attention.tp": 4, "ffn.ep": 2, "ffn.tp": 2}
    with pytest.raises(ConfigError, match=r"attention.tp = 4 and ffn.tp = 2: one must be 1, or bo"):
        build_runtime(layouts.deployment(tiny_model, sizes))
