"""The load generator: its plan, its arithmetic, and a run against a real server."""

import argparse
import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.bench import serving
from jaxserve.bench.__main__ import main
from jaxserve.bench.client import Client, Outcome
from jaxserve.bench.report import percentile
from jaxserve.bench.serving import latencies, meets, planned, summary
from tests.jaxserve.server.http.rig import HttpRig
from tests.jaxserve.waiting import until


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serving.add_arguments(parser)
    return parser.parse_args(["--url", "x", *arguments])


def test_percentiles_are_nearest_ranks() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (1, 25, 26, 50, 99, 100)] == [1, 1, 2, 2, 4, 4]
    assert math.isnan(percentile([], 50))


OUTCOMES = [
    Outcome(start=0, arrivals=[1.0, 1.5, 3.0], tokens=5, prompt_tokens=7, end=3.25),
    Outcome(start=0, arrivals=[2.0], tokens=1, prompt_tokens=3, end=2.5),
    Outcome(start=0, arrivals=[9.0], error="gone", end=9.0),
]


def test_latencies() -> None:
    times = latencies(OUTCOMES)
    assert times.ttft == [1.0, 2.0]
    assert times.itl == [0.5, 1.5]
    assert times.tpot == [0.5]  # two seconds over four steps
    assert times.e2e == [3.25, 2.5]


def test_goodput() -> None:
    met = [meets(outcome, {"ttft": 1.5, "tpot": 0.5}) for outcome in OUTCOMES]
    assert met == [True, False, False]
    part = summary(OUTCOMES, 4.0, {"ttft": 1.5})
    found = {measure.name: measure.value for measure in part.measures}
    assert found["goodput"] == 0.25
    assert found["failed"] == 1
    assert found["generated"] == 6 / 4
    assert found["prompts"] == 10 / 4
    assert found["ttft p99"] == 2000


def test_poisson_arrivals_have_the_rate_and_a_seed() -> None:
    plan = list(planned(options("--rate", "10", "--requests", "2000", "--seed", "3")))
    assert 170 < plan[-1].at < 230
    assert plan == list(planned(options("--rate", "10", "--requests", "2000", "--seed", "3")))
    assert plan != list(planned(options("--rate", "10", "--requests", "2000", "--seed", "4")))


def test_a_mix_of_lengths_stays_inside_the_limit() -> None:
    plan = list(planned(options("--lengths", "sharegpt", "--requests", "500", "--longest", "400")))
    assert all(r.prompt >= 4 and r.output >= 4 and r.prompt + r.output <= 400 for r in plan)
    assert len({request.prompt for request in plan}) > 50


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('{"at": 0.5, "prompt": 3, "output": 4}\n{"at": 1, "prompt": 5, "output": 6}\n')
    assert list(planned(options("--trace", str(path)))) == [(0.5, 3, 4), (1.0, 5, 6)]


def test_prompts_share_what_they_should() -> None:
    given = options("--shared", "0.75", "--lengths", "8,1", "--requests", "2")
    first, second = (
        json.loads(serving.body(request, given, number))["prompt"]
        for number, request in enumerate(planned(given))
    )
    assert first[:6] == second[:6]
    assert first[6:] != second[6:]


@pytest.fixture
def rig() -> Iterator[HttpRig]:
    rig = HttpRig("x" * 60)
    yield rig
    rig.close()


def test_a_run(rig: HttpRig, tmp_path: Path, capsys) -> None:
    written = tmp_path / "report.json"
    arguments = ["serve", "--url", rig.url, "--requests", "20", "--lengths", "5,30"]
    arguments += ["--vocab", "250", "--sla", "ttft=60,tpot=60", "--rate", "200"]
    arguments += ["--json", str(written), "--html", str(tmp_path / "report.html")]
    assert main(arguments) == 0
    report = json.loads(written.read_text())
    found = {m["name"] + m["unit"]: m["value"] for m in report["parts"][0]["measures"]}
    assert found["requests"] == 20
    assert found["failed"] == 0
    assert found["met the SLA%"] == 100
    outcomes = report["parts"][0]["details"]["outcomes"]
    assert [outcome["tokens"] for outcome in outcomes] == [30] * 20
    assert [outcome["prompt_tokens"] for outcome in outcomes] == [5] * 20
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "ttft p99" in page
    assert "goodput" in capsys.readouterr().out
    assert all(params.ignore_eos and params.max_tokens == 30 for params in rig.engine.params)


def test_failures_are_counted(rig: HttpRig, capsys) -> None:
    arguments = ["serve", "--url", rig.url, "--requests", "3", "--vocab", "1000", "--lengths"]
    assert main([*arguments, "99,5"]) == 1
    assert "failed: ValueError: status 400" in capsys.readouterr().err


def test_an_error_in_a_stream_is_one(rig: HttpRig) -> None:
    rig.engine.allowed = 3

    async def run() -> Outcome:
        client = Client(rig.url)
        given = serving.body(serving.Planned(0, 5, 30), options("--vocab", "250"), 0)
        call = asyncio.create_task(client.complete(given))
        await asyncio.to_thread(until, lambda: rig.engine.running)
        await asyncio.sleep(0.1)
        rig.engine.fail("process 1 is gone")
        outcome = await call
        client.close()
        return outcome

    assert "the engine failed; request" in asyncio.run(run()).error
