"""The engine on real programs of a tiny model: what callers get, and what it costs."""

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxserve.engine.request import SamplingParams
from jaxserve.fleet.assembly import open_engine
from jaxserve.roles.compilation import Program
from tests.jaxserve import layouts
from tests.jaxserve.layouts import Collector, ask
from tests.jaxserve.waiting import until

COMPILED = "/jax/core/compile/backend_compile_duration"
VOCAB = layouts.SIZES.vocab_size


@pytest.fixture(params=["colocated", "afd"])
def engine(request):
    with layouts.serving(request.getfixturevalue(f"{request.param}_runtime")) as engine:
        yield engine


class TestSeeds:
    PARAMS = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=77, ignore_eos=True)

    def alone(self, engine):
        return ask(engine, layouts.PROMPTS[5], self.PARAMS).token_ids

    def in_a_crowd(self, engine, place):
        """Among 17 others, greedy and sampled, of which it is the n-th."""
        collector, draw = Collector(), random.Random(place)
        for number, prompt in enumerate(layouts.PROMPTS):
            params = SamplingParams(
                max_tokens=draw.randrange(1, 30),
                temperature=draw.choice([0.0, 0.7, 1.3]),
                top_k=draw.choice([0, 5]),
                top_p=draw.choice([1.0, 0.7]),
                seed=number,
            )
            mine = number == place
            prompt = layouts.PROMPTS[5] if mine else prompt
            collector.submit(
                engine, prompt, self.PARAMS if mine else params, request_id=str(number)
            )
        return collector.wait()[str(place)].token_ids

    def test_alone_and_in_a_crowd(self, engine):
        alone = self.alone(engine)
        assert len(alone) == 20
        assert self.alone(engine) == alone
        for place in (0, 9, 17):
            assert self.in_a_crowd(engine, place) == alone

    @pytest.mark.parametrize("seeds", [range(4), [None] * 4], ids=["seeds", "none"])
    def test_another_seed_another_text(self, engine, seeds):
        """A request without a seed has its own."""
        collector = Collector()
        for seed in seeds:
            params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed)
            collector.submit(engine, layouts.PROMPTS[5], params)
        assert len({tuple(output.token_ids) for output in collector.wait().values()}) == 4


class TestManyCallers:
    """Four threads, a pool that is too small, cancellations at any time."""

    def call(self, engine, seed, reference):
        draw, collector = random.Random(seed), Collector()
        for number in range(30):
            prompt = draw.randrange(len(layouts.PROMPTS))
            request_id, ranked = f"{number} of {seed}: prompt {prompt}", draw.random() < 0.2
            limits = {"max_tokens": draw.randrange(1, 25), "logprobs": 1 if ranked else None}
            params = SamplingParams(temperature=0, **limits)
            collector.submit(engine, layouts.PROMPTS[prompt], params, request_id=request_id)
            if draw.random() < 0.3:
                time.sleep(draw.random() * 0.02)
            if draw.random() < 0.3:
                engine.cancel(request_id)
        for request_id, output in collector.wait().items():
            tokens = reference.tokens[int(request_id.split()[-1])]
            assert output.finish_reason in ("length", "cancelled"), output
            assert output.token_ids == tokens[: len(output.token_ids)], request_id

    @pytest.mark.parametrize(("name", "prefix"), [("afd", False), ("colocated", True)])
    def test_everybody_gets_the_tokens_of_their_prompt(
        self, name, prefix, request, tiny_model, reference
    ):
        runtime = request.getfixturevalue(f"{name}_runtime")
        overrides = {"mode": name, "lanes": 2, "cache.pages": 24, "cache.prefix": prefix}
        runtime = runtime._replace(deployment=layouts.deployment(tiny_model, overrides))
        with layouts.serving(runtime) as engine, ThreadPoolExecutor(4) as pool:
            for first in range(0, 20, 4):  # again, if the four did not happen to overlap
                seeds = range(first, first + 4)
                list(pool.map(lambda seed: self.call(engine, seed, reference), seeds))
                if prefix or engine.schedulers[0].num_preemptions:
                    break
        if prefix:
            assert engine.schedulers[0].queue.prompt_tokens_found > 100
        else:
            assert engine.schedulers[0].num_preemptions > 0

    @pytest.fixture
    def late(self, tiny_model, monkeypatch):
        """An engine that compiles eight of nine programs later, each when the semaphore lets it."""
        own, more = Program.compile, threading.Semaphore(0)

        def compile_(program):
            later = threading.current_thread().name == "compile"
            assert not later or more.acquire(timeout=120)
            return own(program)

        monkeypatch.setattr(Program, "compile", compile_)
        few = {"scheduler.compile_first": "few", "scheduler.token_buckets": [8, 24]}
        few |= {"scheduler.page_buckets": [4, 18], "cache.pages": 19, **layouts.COLOCATED}
        with contextlib.closing(open_engine(layouts.deployment(tiny_model, few))) as engine:
            yield engine, more, engine._compiler

    def test_while_programs_compile(self, reference, late):
        engine, more, compiler = late
        seen, (scheduler,) = [], engine.schedulers
        with ThreadPoolExecutor(4) as pool:
            calls = pool.map(lambda seed: self.call(engine, seed, reference), range(4))
            for made in range(2, 10):
                time.sleep(0.2)
                seen.append(scheduler.num_preemptions)
                more.release()
                until(lambda made=made: len(compiler._made) == made, 120.0)
            list(calls)
        assert (compiler.token_budget, seen[-1] > 0) == (24, True)
        self.call(engine, 4, reference)
        layouts.idle(engine)
        assert scheduler.queue.prompt_tokens_found > 100

    def test_closes_in_the_middle_of_a_program(self, late):
        engine, more, compiler = late
        collector = Collector()
        for prompt in layouts.PROMPTS:
            collector.submit(engine, prompt, layouts.GREEDY)
        collector.wait_for_tokens("request 0", 3)
        threading.Timer(0.2, more.release, (2,)).start()
        engine.close()
        assert (compiler._thread.is_alive(), len(compiler._made)) == (False, 2)
        assert {one.finish_reason for one in collector.wait(1).values()} == {"cancelled"}


class TestNoCompilationAfterReady:
    def serve_200(self, engine) -> int:
        """Random lengths, random sampling, random cancellations; returns how many were cut off."""
        draw, collector = random.Random(0), Collector()
        for number in range(200):
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 61))]
            params = SamplingParams(
                max_tokens=draw.randrange(1, 13),
                temperature=draw.choice([0.0, 0.3, 1.0, 2.0]),
                top_k=draw.choice([0, 1, 5, 1000]),
                top_p=draw.choice([1.0, 0.9, 0.1]),
                min_p=draw.choice([0.0, 0.05]),
                seed=draw.choice([None, number]),
                min_tokens=draw.choice([0, 1]),
                stop_token_ids=tuple(draw.sample(range(VOCAB), draw.choice([0, 3]))),
            )
            request_id = collector.submit(engine, prompt, params)
            if draw.random() < 0.2:
                engine.cancel(f"request {draw.randrange(max(0, number - 3), number + 1)}")
            if draw.random() < 0.1:
                collector.wait_for_end(request_id)  # so that the engine idles now and then
        outputs = collector.wait()
        layouts.idle(engine)
        reasons = [output.finish_reason for output in outputs.values()]
        assert set(reasons) == {"length", "stop", "cancelled"}
        assert len(outputs) == 200
        return reasons.count("cancelled")

    @pytest.mark.parametrize(
        ("overrides", "buckets"),
        [
            ({"scheduler.token_buckets": [8, 24]}, 2),
            (layouts.COLOCATED | {"scheduler.page_buckets": [5, 18]}, 2),
        ],
        ids=["afd", "colocated"],
    )
    @pytest.mark.unoptimised
    def test_200_requests(self, overrides, buckets, tiny_model):
        """No thread compiles, though all buckets are used."""
        engine = open_engine(layouts.deployment(tiny_model, {"lanes": 2, **overrides}))
        events, used = [], set()

        def listen(event, seconds, **details):
            if event == COMPILED:
                events.append(details)

        begin = engine.driver.begin
        engine.driver.begin = lambda plan: (used.add(plan.bucket), begin(plan))
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            assert self.serve_200(engine) > 0
            assert events == []
            assert engine.compilations_after_ready == 0
            assert len(used) == buckets
            # The counts can fail: something new on the engine's thread shows in both.
            collector = Collector()

            def compile_something(output):
                jax.jit(lambda x: x * 2 + 1)(np.arange(7))
                collector(output)

            collector.submit(engine, [1], SamplingParams(max_tokens=1), on_output=compile_something)
            collector.wait()
            assert len(events) == engine.compilations_after_ready == 1
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
            engine.close()
