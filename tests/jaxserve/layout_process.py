"""One process of a run of `layouts.py` in several: started by the local launcher, see
`test_layouts_processes.py`. Process 0 leads an engine through all prompts, with --figures until the
pipeline was measured, with --moving while experts move, and writes the tokens of the last round and
what was seen of the pipeline."""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.commands.worker_part import follow_pages
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import TokenOutput
from jaxserve.fleet import bootstrap
from jaxserve.fleet.arguments import add_arguments, from_arguments
from jaxserve.fleet.assembly import DEFAULTS, open_engine, open_follower
from jaxserve.fleet.following import Following
from jaxserve.fleet.leader import Leader
from jaxserve.model import matrix_formats
from jaxserve.roles import expert_slots
from jaxserve.roles.expert_balancer import ExpertBalancer
from jaxserve.roles.step_programs import Wire
from tests.jaxserve import layouts

SECONDS = 120
"""How long the pipeline may take to be measured."""


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--overrides", type=json.loads, required=True)
    parser.add_argument("--written", type=Path, required=True)
    parser.add_argument("--figures", action="store_true")
    parser.add_argument("--moving", action="store_true")
    parser.add_argument("--crowded", action="store_true")
    parser.add_argument("--reordered", action="store_true")
    parser.add_argument("--loses", type=int)
    parser.add_argument("--as-on-tpus", action="store_true")
    options = parser.parse_args()
    if options.as_on_tpus:
        as_on_tpus().start()
    deployment = layouts.deployment(options.model, options.overrides)
    with bootstrap.joined(from_arguments(options), deployment) as peers:
        if isinstance(peers, Leader):
            lead(deployment, peers, options)
        else:
            if options.moving and peers.identity.process_id == 2:
                read_nothing_once()
            if options.reordered:
                forget_the_order()
            runtime = open_follower(deployment, peers)
            if options.loses == peers.identity.process_id:
                lose_a_step(runtime.driver)
            Following(runtime, peers, pages=follow_pages(deployment, None, runtime.driver)).run()


def lead(deployment: Deployment, leader: Leader, options: argparse.Namespace) -> None:
    engine = open_engine(deployment, DEFAULTS, leader)
    engine.pipeline()  # Asking has it measured.
    if options.loses == 0:
        lose_a_step(engine.driver)
    if options.moving:
        move(engine, fails=leader.identity.processes > 2)
    prompts = layouts.prompts_below(read_config(options.model)[0].vocab)
    generate = crowded if options.crowded else layouts.generate
    tokens = generate(engine, prompts)
    view = engine.pipeline()
    deadline = time.monotonic() + SECONDS
    while options.figures and time.monotonic() < deadline:
        if view.measured_at is not None and view.experts.expert_tokens:
            break
        tokens = layouts.generate(engine)
        view = engine.pipeline()
    layouts.idle(engine)
    assert engine.compilations_after_ready == 0
    pages = engine.load().host_pages
    engine.close()
    options.written.write_bytes(msgspec.json.encode([tokens, view, pages]))


def move(
    engine: Engine,
    prompts: Sequence[Sequence[int]] = layouts.PROMPTS,
    *,
    fails: bool = True,
    expected: list[list[int]] | None = None,
) -> None:
    """Every expert to another rank while requests run, from the checkpoint and between devices,
    and then where they balance best. If it fails at first, since process 2 cannot read its own, all
    stay. The tokens meanwhile are those expected; None: any."""
    experts = engine.experts
    assert isinstance(experts, ExpertBalancer)
    for number, source in enumerate(("checkpoint", "checkpoint", "devices", "devices")):
        experts._settings = msgspec.structs.replace(experts._settings, source=source)
        if number < 3:
            experts.place({layer: slots[::-1] for layer, slots in experts.placements.items()})
        else:
            assert experts.rebalance(dry_run=False, seconds=SECONDS).moves or not expected
        await_moves(engine, prompts, expected)
        assert (experts.view().moves > 0) == (number > 0 or not fails)


def await_moves(
    engine: Engine, prompts: Sequence[Sequence[int]], expected: list[list[int]] | None = None
) -> None:
    """Waits until no expert moves any more; requests run meanwhile, with the tokens expected."""
    deadline = time.monotonic() + SECONDS
    while engine.experts is not None and engine.experts.view().moving:
        assert time.monotonic() < deadline
        tokens = layouts.generate(engine, prompts)
        assert expected in (None, tokens)


def as_on_tpus() -> Any:
    """A patch: programs are those of TPUs, on CPU devices."""
    found = matrix_formats.placed

    def placed(config: ModelConfig, mesh: Mesh) -> ModelConfig:
        return msgspec.structs.replace(found(config, mesh), platform="tpu")

    return patch.object(matrix_formats, "placed", placed)


def crowded(engine: Engine, prompts: Sequence[Sequence[int]] = layouts.PROMPTS) -> list[list[int]]:
    """The tokens, where requests are preempted, and one is cancelled at its first token."""
    other = layouts.Collector()

    def cancel(output: TokenOutput) -> None:
        other(output)
        engine.cancel(output.request_id)

    other.submit(engine, [5], layouts.GREEDY, on_output=cancel, request_id="cancelled")
    tokens = layouts.generate(engine, prompts)
    assert other.wait()["cancelled"].finish_reason == "cancelled"
    assert engine.load().preemptions > 0
    return tokens


def forget_the_order() -> None:
    """Exchanges in steps of this process do not depend on each other."""
    exchange = Wire.exchange
    patch.object(Wire, "exchange", lambda *given: (exchange(*given)[0], given[-1])).start()


def lose_a_step(driver: Any) -> None:
    """The tenth step fails on this process's devices."""
    advance, steps = driver.advance, itertools.count()

    def lost_or_advanced() -> Any:
        if next(steps) == 9:
            raise JaxRuntimeError("INTERNAL: a device lost its step")
        return advance()

    driver.advance = lost_or_advanced


def read_nothing_once() -> None:
    """The first expert of the checkpoint cannot be read here."""
    errors = [OSError("no such expert")]
    read = expert_slots.read_experts

    def read_or_fail(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return read(*arguments)

    patch.object(expert_slots, "read_experts", read_or_fail).start()


if __name__ == "__main__":
    sys.exit(main())
