"""Short storms: processes of a tiny fleet are killed under load. Times are not judged."""

import json
import os
import subprocess
import sys

import pytest

from tests.jaxserve import layouts
from tests.jaxserve.fleet.launched import REPOSITORY
from tests.jaxserve.fleet.test_fleet_processes import with_tokenizer

pytestmark = [pytest.mark.multihost, pytest.mark.unoptimised]

SECONDS, LONG_SECONDS = 500, 2400
OVERRIDES = layouts.LIMITS | {"mode": "colocated", "scheduler.max_length": 144}


def storm(tiny_model, folder, overrides, *arguments, seconds=SECONDS):
    """Runs a storm. Returns its report, part → measure → value, and its output."""
    model = with_tokenizer(tiny_model, folder)
    report = folder / "report.json"
    command = [sys.executable, "-m", "jaxserve.chaos", "--model", str(model), "--json", str(report)]
    command += ["--vocab", f"{layouts.SIZES.vocab_size}", *arguments]
    for key, value in (OVERRIDES | overrides).items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    said = done.stdout + done.stderr
    assert done.returncode in (0, 1), said
    assert report.exists(), said
    parts = json.loads(report.read_text())["parts"]
    found = {part["name"]: {m["name"]: m["value"] for m in part["measures"]} for part in parts}
    return found, said


def check(found, said):
    """Checks that every request got its tokens, and that no request or process is left over."""
    everything = found["all"]
    assert everything["right"] > 10, said
    for name in (
        "wrong",
        "hung",
        "lost without a word",
        "failed, with a reason",
        "processes that did not come back",
        "kinds of state left at the end",
    ):
        assert everything[name] == 0, said


def test_two_processes_are_killed_at_once(tiny_model, tmp_path):
    options = ("--kills", "2", "--clients", "4", "--questions", "4", "--calm", "1", "--seed", "1")
    found, said = storm(tiny_model, tmp_path, {"domains": 2}, *options, "--together", "2")
    check(found, said)
    assert found["kill router+domain"]["faults"] == found["kill domain+domain"]["faults"] == 1


@pytest.mark.nightly
def test_requests_that_share_system_prompts(tiny_model, tmp_path):
    overrides = {"domains": 2, "prefill.workers": 1, "prefill.cache": {"page_size": 16}}
    options = ("--requests", "400", "--systems", "4", "--questions", "60", "--resets", "4")
    found, said = storm(tiny_model, tmp_path, overrides, *options, "--clients", "16")
    check(found, said)
    assert found["all"]["resets of the prefix caches"] == 4
    assert found["all"]["tokens handed over by prefill workers"] > 1000


@pytest.mark.nightly
@pytest.mark.timeout(LONG_SECONDS + 100)
def test_everything_goes_wrong_with_workers_of_two_processes(tiny_model, tmp_path):
    overrides = {"domains": 2, "prefill.workers": 1, "attention.dp": 2}
    overrides |= {"prefill.attention": {"dp": 1, "tp": 2}, "prefill.cache": {"page_size": 16}}
    options = ("--faults", "kill,stop,slow,drop,delay,disk", "--kills", "26")
    options += ("--processes", "2", "--clients", "4", "--seed", "2")
    found, said = storm(tiny_model, tmp_path, overrides, *options, seconds=LONG_SECONDS)
    check(found, said)
    assert found["kill follower"]["faults"] >= 1


@pytest.mark.nightly
@pytest.mark.timeout(LONG_SECONDS + 100)
def test_attention_over_pull_is_killed_and_finds_its_pages(tiny_model, tmp_path):
    overrides = {"mode": "afd", "lanes": 2, "fleet.absent_seconds": 300, "cache.host_gb": 0.1}
    overrides |= {"cache.storage": str(tmp_path / "pages"), "attention": {"runtime": "attention"}}
    overrides |= {"ffn": {"runtime": "ffn"}, "link": {"transport": "pull", "addresses": ["h:1"]}}
    options = ("--kills", "3", "--only", "attention", "--clients", "6", "--pause", "10")
    options += ("--systems", "3", "--questions", "40")
    found, said = storm(tiny_model, tmp_path, overrides, *options, seconds=LONG_SECONDS)
    check(found, said)
    assert found["all"]["KV pages found in the folder at the end"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(LONG_SECONDS + 100)
def test_processes_of_both_roles_over_pull_are_killed(tiny_model, tmp_path):
    """The only domain and its ffn worker have two processes each."""
    overrides = {"mode": "afd", "lanes": 2, "fleet.absent_seconds": 300}
    overrides["attention"] = {"runtime": "attention", "dp": 2, "processes": 2}
    overrides["ffn"] = {"runtime": "ffn", "ep": 2, "processes": 2}
    overrides["link"] = {"transport": "pull", "addresses": ["h:1", "h:2"]}
    options = ("--kills", "3", "--only", "attention,ffn,follower", "--clients", "4")
    options += ("--warm-spares", "--pause", "10")
    check(*storm(tiny_model, tmp_path, overrides, *options, seconds=LONG_SECONDS))
