"""Fleets in simulated time, against cases worked out by hand."""

import json

import msgspec
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.engine.request import TokenOutput
from jaxserve.errors import ConfigError
from jaxserve.fleet.simulation import (
    FleetConditions,
    FleetSimulation,
    FleetTraffic,
    Loss,
    SimulatedCoordinator,
)
from jaxserve.plan import main
from jaxserve.planner.demand import Lengths
from jaxserve.planner.deploy_fleet import Handoff
from tests import golden
from tests.jaxserve.fleet.fleet_world import World
from tests.jaxserve.planner.making import Given

STEP = 0.1
"""Seconds of a step: 10 layers of 4 + 1 + 4 + 1 ms."""
PULL = 0.01 + 96 * 1e-4
"""Seconds to pull the 6 whole pages of 100 tokens: 10 ms, and 0.1 ms a token."""
FILE = golden.sizes("simulation")


def simulate(
    folder,
    requests=1,
    rate=1000.0,
    output=3,
    shared=0,
    losses=(),
    running=(),
    hits=0.0,
    prefixes=1,
    **overrides,
):
    """Requests of 100 + `output` tokens, evenly spaced; the first after one space."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    deployment = load_deployment(folder, FILE | keys)
    times = Given(layers=10, groups=1, attend=4e-3, dispatch=1e-3, ffn=4e-3, combine=1e-3)
    traffic = FleetTraffic(
        lengths=Lengths(prompt=100, output=output, longest=256),
        rate=rate,
        requests=requests,
        even=True,
        shared=shared,
        running=running,
        hits=hits,
        prefixes=prefixes,
    )
    pages = Handoff(token_bytes=1.0, bytes_per_second=1e4, latency=0.01)
    conditions = FleetConditions(pages=pages, losses=losses)
    prefill = times if deployment.prefill.workers else None
    return FleetSimulation(deployment, traffic, conditions, domain=times, prefill=prefill)


def means(result):
    return {role: found and found.mean for role, found in result.waits.items()}


def test_one_request_waits_for_nothing(tmp_path):
    """Two chunks of a prompt of 100 tokens, the pages, and a step for each token."""
    result = simulate(tmp_path).run()
    assert result.finished == 1
    assert result.ttft.mean == pytest.approx(2 * STEP + PULL + STEP)
    assert result.tpot.mean == pytest.approx(STEP)
    assert means(result) == pytest.approx({"prefill": 0.0, "pages": PULL, "domain": 0.0})
    assert result.tokens_per_second == pytest.approx(3 / (5 * STEP + PULL))
    whole = 0.001 + 5 * STEP + PULL
    assert result.busy == pytest.approx(
        {"prefill": 2 * 0.8 * STEP / whole, "domain": 3 * 0.8 * STEP / whole}
    )


def test_a_first_token_takes_one_of_the_steps_that_a_simulated_one_stands_for(tmp_path):
    simulation = simulate(tmp_path)
    coarse = {"tokens_a_step": 4, "step_seconds": STEP}
    simulation._conditions = msgspec.structs.replace(simulation._conditions, **coarse)
    assert simulation.run().ttft.mean == pytest.approx(2 * STEP + PULL + STEP / 4)


def test_sequences_that_run_at_the_start(tmp_path):
    """Both requests have their pages: the one of 20 tokens goes on when the simulation ends with
    the request's first token, in the first step that begins after its pages have come."""
    simulation = simulate(tmp_path, running=((100, 2), (50, 20)))
    result = simulation.run()
    assert (result.finished, result.refused) == (1, 0)
    came = 0.001 + 2 * STEP + PULL
    assert came + STEP < result.ttft.mean + 0.001 <= came + 3 * STEP
    assert simulation.samples()[1] == []  # nine tokens would be a pace
    assert simulate(tmp_path, running=((50, 20),), rate=0.5).run().tpot.mean == pytest.approx(STEP)


def test_without_prefill_workers_the_domain_prefills(tmp_path):
    result = simulate(tmp_path, prefill__workers=0).run()
    assert result.ttft.mean == pytest.approx(2 * STEP)
    assert means(result) == {"prefill": None, "pages": None, "domain": 0.0}


def test_a_second_request_waits_for_the_worker_and_for_the_slot(tmp_path):
    """One at a time: the second's prompt after the first's, and its pages after the first's end."""
    asked = {"scheduler__slots": 1, "fleet__domain_waiting": 0}
    result = simulate(tmp_path, requests=2, output=6, **asked).run()
    # Arrivals at 1 and 2 ms. Computed at 201 and 401 ms; the first has its six tokens at 201 + PULL
    # + 600 ms, and then the second's pages come.
    prefill_wait = (0.0 + 0.199) / 2
    domain_wait = (0.0 + (0.201 + PULL + 0.6 - 0.401)) / 2
    assert means(result) == pytest.approx(
        {"prefill": prefill_wait, "pages": PULL, "domain": domain_wait}
    )
    first = 0.201 + PULL + STEP - 0.001
    second = 0.201 + PULL + 0.6 + PULL + STEP - 0.002
    assert result.ttft.mean == pytest.approx((first + second) / 2)
    assert result.tpot.mean == pytest.approx(STEP)


def test_two_prefill_workers_and_two_domains_share_the_work(tmp_path):
    result = simulate(tmp_path, requests=2, prefill__workers=2, domains=2, scheduler__slots=1).run()
    assert result.ttft.mean == pytest.approx(2 * STEP + PULL + STEP)
    assert means(result) == pytest.approx({"prefill": 0.0, "pages": PULL, "domain": 0.0})


def test_hand_offs_share_the_bytes_and_not_the_latency_of_either_end(tmp_path):
    fleet, size = simulate(tmp_path), 96 * 1e-4
    assert fleet._cross("p0", "d0", 96) == pytest.approx(PULL)
    assert fleet._cross("p0", "d1", 96) == pytest.approx(PULL + size)
    assert fleet._cross("p1", "d1", 96) == pytest.approx(PULL + size)
    assert fleet._cross("p2", "d2", 96) == pytest.approx(PULL)


def test_prompts_that_begin_alike(tmp_path):
    """A second later, both sides have 64 of the 100 tokens: one chunk, and 32 tokens to hand over;
    with 96 of them the domain computes the rest itself."""
    result = simulate(tmp_path, requests=2, rate=1.0, shared=64).run()
    first, second = 2 * STEP + PULL, STEP + 0.01 + 32 * 1e-4
    assert result.ttft.mean == pytest.approx((first + second) / 2 + STEP)
    assert result.found == pytest.approx(64 / 200)
    result = simulate(tmp_path, requests=2, rate=1.0, shared=96).run()
    assert result.ttft.mean == pytest.approx((first + 2 * STEP) / 2)
    assert result.found == 0, "one prompt, and nothing to find for it"


def test_hits_are_there_from_the_start(tmp_path):
    """64 of 100 tokens: one chunk instead of two, already for the first request. The router sends
    prompts to idle workers that have not had any of their beginning yet."""
    assert simulate(tmp_path, hits=0.64).run().ttft.mean == pytest.approx(STEP + PULL + STEP)
    result = simulate(tmp_path, 16, 15.0, hits=0.64, prefixes=4, prefill__workers=2).run()
    assert [result.found, result.waits["prefill"].mean] == pytest.approx([0.64, 0])


def test_a_domain_that_is_lost(tmp_path):
    """After two of six tokens: prompt and tokens are prefilled again, and go on at the other."""
    at = 0.001 + 2 * STEP + PULL + 2.5 * STEP
    loss = Loss(worker="domain 0", at=at, seconds=1.0)
    result = simulate(tmp_path, output=6, domains=2, losses=(loss,)).run()
    assert (result.finished, result.replays) == (1, 1)
    assert result.ttft.mean == pytest.approx(2 * STEP + PULL + STEP)
    assert result.tpot.mean == pytest.approx((1.5 * STEP + 2 * STEP + PULL + 4 * STEP) / 5)


def test_the_only_prefill_worker_is_lost_and_comes_back(tmp_path):
    loss = Loss(worker="prefill 0", at=0.1, seconds=2.0)
    result = simulate(tmp_path, losses=(loss,), pages__on_failure="fail").run()
    assert (result.finished, result.replays) == (1, 1)
    assert result.ttft.mean == pytest.approx(2.1 - 0.001 + 2 * STEP + PULL + STEP)
    with pytest.raises(ConfigError, match="'decode 0': there are prefill 0, domain 0"):
        simulate(tmp_path, losses=(Loss(worker="decode 0", at=0.1, seconds=2.0),))


def test_domains_of_one_ffn_worker_take_turns_on_it(tmp_path):
    """Each has an ffn of 4 ms between an attend of 4 ms and links of 1: there is room for two."""
    afd = {"mode": "afd", "domains": 2, "prefill__mode": "colocated"}
    afd |= {"scheduler__slots": 1, "prefill__workers": 2}
    result = simulate(tmp_path, requests=2, output=20, **afd).run()
    assert result.finished == 2
    assert result.tpot.p99 == pytest.approx(STEP, rel=0.02)
    assert result.busy["ffn"] > 0.5


def test_more_than_the_router_takes_is_refused(tmp_path):
    result = simulate(
        tmp_path, requests=9, scheduler__slots=1, fleet__prefill_waiting=2, pages__held=1
    ).run()
    assert (result.finished, result.refused) == (3, 6)


def test_command(capsys):
    config = CONFIGS / "step3-fleet.yaml"
    asked = ["simulate", "--config", str(config), "--hardware", "h800", "--prompt", "1K"]
    asked += ["--output", "16", "--requests", "20", "--set", "fleet.late=queue"]
    asked += ["--shared", "256", "--prefixes", "3", "--lose", "domain 0@0.5s+0.5s"]
    assert main([*asked, "--rate", "20"]) == 0
    shown = capsys.readouterr().out
    rows = dict(line.split("  ", 1) for line in shown.splitlines()[1:])
    assert {"TTFT ms", "TPOT ms", "wait for prefill ms", "wait for pages ms"} <= set(rows)
    assert main([*asked, "--rate", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["finished"] == 18
    assert main(asked) == 2
    assert "--shared needs --rate" in capsys.readouterr().err


class SimulatedWorld(World):
    kind = SimulatedCoordinator


def test_runs_are_logged_as_outputs_are():
    """Up to the first with which there is more to do."""
    worlds = [SimulatedWorld.without_prefill("d0:1") for _ in range(2)]
    for world in worlds:
        for name in ("a1", "a2", "a3"):
            world.submit(name, 20, max_tokens=9)
        for attempt in list(world.running)[:2]:
            world.emit(attempt)
        world.now += 0.5
    one, other = worlds
    first, second, third = one.running
    runs = [
        (first, [5, 6]),
        (second, [7]),
        (third, [8]),
        (first, [9]),
        ("gone", [1]),
        (second, None),
    ]
    rest = enumerate(runs)
    assert one.coordinator.log(rest) == 2  # its first tokens
    assert one.coordinator.log(rest) == 4  # nobody's
    assert one.coordinator.log(rest) == 5  # not tokens alone
    assert one.coordinator.log(rest) is None
    for attempt, tokens in (runs[0], runs[1], runs[3]):
        other.coordinator.output(attempt, TokenOutput(request_id=attempt, token_ids=tokens or []))
    for name in ("a1", "a2", "a3"):
        mine, its = (world.coordinator.requests[name] for world in worlds)
        assert (mine.emitted, mine.last_at) == (its.emitted, its.last_at)
    assert one.coordinator.requests["a1"].emitted == [0, 5, 6, 9]
    paces = [world.coordinator.placement.workers["d0:1"].pace for world in worlds]
    assert paces[0] == paces[1] > 0
