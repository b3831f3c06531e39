"""`plan deploy`, as it is typed."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from jaxserve.config.load import deployment_of, load_deployment
from jaxserve.fleet.deploy_command import _part
from jaxserve.plan import main
from jaxserve.serve import main as serve
from tests import golden

DEPLOY = ["deploy", "--model", "qwen3-30b-a3b", "--hardware", "h100", "--rate", "200"]
DEPLOY += ["--prompts", "512", "--outputs", "32", "--prefix-hits", "0.25", "--spread", "0.3"]
DEPLOY += ["--ttft", "p95=200ms", "--tpot", "p95=20ms", "--max-devices", "2"]
"""Two devices: what is tried is little."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A plan that is written, drawn and simulated: (its folder, what was printed)."""
    folder = tmp_path_factory.mktemp("plan")
    asked = [*DEPLOY, "--write", str(folder / "plan.yaml"), "--html", str(folder / "plan.html")]
    asked += ["--json", "--simulate", "--modes", "tp"]
    # In a process of its own: checking the types of every call takes minutes here.
    command = [sys.executable, "-m", "jaxserve.plan", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=True)
    return folder, json.loads(done.stdout)


def test_the_written_file_does_as_the_plan(made):
    """Two simulations: of the plan, in the middle of things, and of its file from the start."""
    _, tree = made
    plan, of_file = tree["prediction"], tree["of_file"]
    assert of_file["refused"] == plan["refused"] == 0
    assert of_file["finished"] >= 500
    for what, share in (("ttft", 0.15), ("tpot", 0.05)):
        for name in ("mean", "p50", "p90", "p95"):
            assert plan[what][name] == pytest.approx(of_file[what][name], rel=share)
    for found in (plan, of_file):
        assert found["ttft_asked"] <= 0.2 * 1.05
        assert found["tpot_asked"] <= 0.02 * 1.05


def test_the_written_file(made, capsys):
    folder, tree = made
    assert serve(["--config", str(folder / "plan.yaml"), "--check"]) == 0
    assert "a prefill worker:" in capsys.readouterr().out
    deployment = load_deployment(folder / "plan.yaml")
    assert deployment.prefill.workers == tree["prefill"]["workers"] == len(deployment.fleet.prefill)
    assert len(deployment.fleet.domains) == tree["decode"]["units"]
    worker = deployment_of(deployment, "prefill")
    assert worker.scheduler.token_budget == tree["prefill"]["chunk"]
    assert worker.cache.pages * 64 > 10 * worker.scheduler.max_length
    assert deployment.fleet.ttft_seconds == 0.2


@pytest.mark.nightly
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("line", golden.text("fleet/scenarios.txt").splitlines())
def test_plans_do_what_they_were_asked_for_and_do_not_jump(line):
    """Files within 5 % of their targets; 1 % more or less costs 3 %, or one machine."""
    command = [sys.executable, "-m", "tests.jaxserve.fleet.scenarios", line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    found = json.loads(done.stdout)
    assert max(found["late"]) <= 1.05
    for dollars in found["near"]:
        change = abs(dollars - found["dollars"])
        assert change <= max(0.03 * found["dollars"], 1.001 * found["machine"])


def test_the_money_adds_up(made):
    _, tree = made
    hour = sum(role["dollars_an_hour"] for role in tree["roles"])
    assert hour == pytest.approx(2.5 * sum(role["chips"] for role in tree["roles"]))
    assert tree["dollars_a_month"] == pytest.approx(730 * hour)
    million = tree["dollars_per_million_tokens"]
    tokens = 200 * 3600 / 1e6
    assert million["in"] * 512 * tokens + million["out"] * 32 * tokens == pytest.approx(
        hour, rel=0.01
    )
    assert len(tree["sensitivity"]) == 15
    assert "not verified" in tree["prices"][0]


def test_the_page_marks_the_chosen_units(made):
    folder, _ = made
    text = (folder / "plan.html").read_text(encoding="utf-8")
    ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    assert ">chosen<" in text


def test_what_is_wrong_is_named(capsys):
    def said(arguments):
        assert main([*DEPLOY, *arguments.split()]) == 2
        return capsys.readouterr().err

    golden.check_each("commands/deploy_arguments.txt", said)


@golden.table("fleet/cannot_be_met.yaml")
def test_what_cannot_be_met_is_said(capsys, more, message):
    assert main([*DEPLOY, "--modes", "tp", *more]) == 1
    assert message in capsys.readouterr().err


@golden.table("fleet/parts.yaml")
def test_a_part_in_the_proportions_of_the_whole(workers, units, groups, each, prefill, whole):
    worker = SimpleNamespace(layout=SimpleNamespace(dp=groups))
    made = {"worker": worker, "workers": workers, "units": units, "sequences": each * units}
    found = [list(_part(SimpleNamespace(**made), part)) for part in ("prefill", "whole")]
    assert found == [prefill, whole]
