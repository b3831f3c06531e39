"""`python -m jaxserve.bench stages`: stages of a deployment at given batches and contexts, in two
processes of one core each.

Attention and FFN are in a process and on a core each, as in `pipelines.py`, with the deployment's
model and buckets. Every round takes all batches and contexts in an order of its own, so that other
work on the machine affects all points alike. Threads that enqueue or note the end of a stage may
run on either core: one that waits for the next stage's core would note that end late. The result is
a timeline, for `plan calibrate` and `plan verify`.
"""

import argparse
import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxserve.bench.report import count, describe_machine, this_machine
from jaxserve.bench.workers import Task, barrier, leave_runtime, run_workers, two_cores
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.engine.runtime import warm_up
from jaxserve.errors import ConfigError
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.assembly import build_runtime
from jaxserve.fleet.devices import initialise
from jaxserve.model.attention.kv_cache import ring_pages
from jaxserve.observe import timeline_view
from jaxserve.observe.merging import merge
from jaxserve.observe.recorder import Recorder
from jaxserve.observe.spans import Span
from jaxserve.ports import free_port
from jaxserve.roles.layout import Bucket
from jaxserve.roles.sampling import Finished
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.worker import Passed
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows

HELP = "a timeline of batches and contexts"
_RUN_SECONDS, _COMPILE_SECONDS = 600.0, 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("--config", default="demo", metavar="FILE", help="an afd deployment on this machine (demo)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of it, as lanes=1")
    add("--batches", type=counts, default=[4, 16], metavar="N,N", help="sequences a DP group")
    add("--contexts", type=counts, default=[128, 512], metavar="N,N", help="tokens of a sequence")
    add("--steps", type=count, default=6, help="in a row (6)")
    add("--rounds", type=count, default=4, help="over all batches and contexts (4)")
    add("--timeline", type=Path, required=True, metavar="DIR", help="receives the timeline")


def run(options: argparse.Namespace) -> int:
    """Runs both processes and writes their timeline.

    Raises:
      ConfigError: the deployment has no two roles in one runtime, or no bucket for a point.
      BenchError: a process failed.
    """
    deployment = load_deployment(options.config, options.set)
    if deployment.topology.separates_domains:
        raise ConfigError("stages: needs mode afd, and another link.transport than pull")
    for sequences in options.batches:
        for context in options.contexts:
            bucket_of(deployment, sequences, context)
    cores = two_cores("stages")
    print(describe_machine(this_machine()), flush=True)
    shared = {name: getattr(options, name) for name in ("batches", "contexts", "steps", "rounds")}
    shared |= {"config": options.config, "overrides": options.set, "cores": cores}
    shared["coordinator"] = f"127.0.0.1:{free_port()}"
    workers = [Task(work, {**shared, "process": n}, core=core) for n, core in enumerate(cores)]
    found = run_workers(workers, _RUN_SECONDS)
    spans = [msgspec.convert(each, list[Span]) for each in found]
    summary = timeline_view.write(options.timeline, merge(spans))
    print(f"{options.timeline}: {timeline_view.describe(summary)}")
    return 0


def bucket_of(deployment: Deployment, sequences: int, context: int) -> Bucket:
    """Returns the bucket of a decode step with `sequences` sequences a DP group.

    Raises:
      ConfigError: no bucket is large enough, or the pages do not suffice.
    """
    limits, cache = deployment.scheduler, deployment.cache
    pages = -(-context // cache.page_size)
    if sequences > limits.slots:
        raise ConfigError(f"--batches {sequences}: scheduler.slots is {limits.slots}")
    if context > limits.max_length or sequences * pages > cache.pages:
        raise ConfigError(
            f"--contexts {context}: {sequences} sequences take {sequences * pages} pages; "
            f"cache.pages is {cache.pages}, scheduler.max_length {limits.max_length}"
        )
    tokens = next((size for size in limits.token_buckets if size >= sequences), None)
    reach = next((size for size in limits.page_buckets if size >= pages), None)
    if tokens is None or reach is None:
        raise ConfigError(f"no bucket for {sequences} sequences of {context} tokens")
    return Bucket(tokens, reach)


def decode_plan(
    deployment: Deployment,
    lane: int,
    number: int,
    bucket: Bucket,
    sequences: int,
    context: int,
    rings: int = 0,
    token_id: int | None = None,
) -> StepPlan:
    """Builds a decode step of sequences with this context.

    Args:
      rings: see `plan_of_rows`.
      token_id: of all sequences; None: drawn at random, so that their experts are random, too.
    """
    random = np.random.default_rng(number)
    pages = -(-context // deployment.cache.page_size)
    groups = [
        [
            SequenceRow(
                slot=slot,
                token_ids=[int(random.integers(1, 256)) if token_id is None else token_id],
                kv_length=context,
                page_ids=list(range(slot * pages, (slot + 1) * pages)),
                sample=True,
            )
            for slot in range(sequences)
        ]
        for _ in range(deployment.attention.dp)
    ]
    slots = deployment.scheduler.slots
    return plan_of_rows(lane, number, bucket, groups, slots=slots, rings=rings)


def measure(
    deployment: Deployment,
    driver: Any,
    options: argparse.Namespace,
    rounds: int,
    rings: int = 0,
) -> None:
    """Runs all rounds; the loop enqueues a lane's next step before it reads the last one's tokens.

    Args:
      driver: a `Cell`.
      rings: see `plan_of_rows`.
    """
    number = 0
    points = list(itertools.product(options.batches, options.contexts))
    for turn in range(rounds):
        random.Random(turn).shuffle(points)  # alike in both processes
        for sequences, context in points:
            bucket = bucket_of(deployment, sequences, context)
            plans = [
                decode_plan(
                    *(deployment, at % deployment.lanes, number + at, bucket),
                    *(sequences, context, rings),
                )
                for at in range(options.steps * deployment.lanes)
            ]
            number += len(plans)
            run_steps(driver, plans)


def run_steps(driver: Any, plans: Sequence[StepPlan]) -> None:
    """Runs steps of all lanes of a `Cell` in turn, one of each lane at a time, to their end."""
    waiting = list(plans)
    unread: dict[int, Finished | Passed] = {}
    while waiting or driver.active:
        for lane in driver.idle_lanes:
            following = next((plan for plan in waiting if plan.lane == lane), None)
            if following is not None:
                waiting.remove(following)
                driver.begin(following)
        finished = driver.advance()
        position = driver.position()
        assert position is not None
        lane = position[1]
        if lane in unread:
            _read(driver, lane, unread.pop(lane))
        unread[lane] = finished
    for lane, finished in unread.items():
        _read(driver, lane, finished)


def _read(driver: Any, lane: int, finished: Finished | Passed) -> None:
    if isinstance(finished, Finished):
        np.asarray(finished.sampled.addressable_data(0))
        if driver.observer is not None:
            driver.observer.seen(lane, finished.sampled)
    np.asarray(finished.last.addressable_data(0))


def work(
    config: str,
    overrides: list[str],
    coordinator: str,
    process: int,
    cores: list[int],
    rounds: int,
    **points: Any,
) -> list[Span]:
    """One of the two processes. `points` has `batches`, `contexts` and `steps`."""
    deployment, wanted = load_deployment(config, overrides), argparse.Namespace(**points)
    initialise(
        ProcessArguments(process_id=process, processes=2, coordinator=coordinator), deployment
    )
    runtime = build_runtime(deployment)
    barrier("compiled", _COMPILE_SECONDS)  # attention has more programs; the link waits for less
    warm_up(runtime)
    rings = ring_pages(runtime.config, deployment)
    measure(deployment, runtime.driver, wanted, 1, rings)  # warm everywhere
    barrier("warm")
    os.sched_setaffinity(0, cores)  # this thread's, and that of those which it starts
    recorder = Recorder(process)
    runtime.driver.observer = recorder
    measure(deployment, runtime.driver, wanted, rounds, rings)
    spans = recorder.ended(30.0)
    leave_runtime(process)
    return spans


def counts(text: str) -> list[int]:
    """Type of options that take several numbers of things, as in `4,16`."""
    return [count(item) for item in text.split(",")]
