import json
import resource
import subprocess
import sys

import pytest

from jaxserve.plan import main

ASKED = ["simulate", "--config", "qwen3-30b-a3b", "--hardware", "v6e"]
ASKED += ["--steps", "8", "--warm-up", "2"]


def test_as_text_page_and_timeline(capsys, tmp_path):
    page, folder = tmp_path / "page.html", tmp_path / "timeline"
    more = ["--jitter", "0.1", "--html", str(page), "--timeline", str(folder)]
    assert main([*ASKED, *more]) == 0
    text = capsys.readouterr().out
    assert "as simulated" in page.read_text(encoding="utf-8")
    for part in ("TPOT ms", "tokens/s/device", "bubble", "decode only, every slot taken: prompts"):
        assert part in text
    assert len(list(folder.iterdir())) == 3


def test_for_programs(capsys):
    more = ["--json", "--skew", "zipf:1.2", "--placed", "--jitter", "0.1"]
    assert main([*ASKED, *more, "--set", "ffn.redundant_slots=2"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["result"]["balance"] > 0.95
    assert set(tree) == {"scope", "lengths", "conditions", "result"}
    assert tree["conditions"]["jitter"]["spread"]["ffn"] == 0.1
    assert tree["result"]["tpot"]["p50"] > 0
    assert main([*ASKED, "--json", "--rate", "20", "--requests", "20"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["ttft"]["p50"] > 0


@pytest.mark.nightly
def test_attention_workers_on_one_ffn_worker(capsys):
    asked = ["simulate", "--config", "step3-fleet", "--workers", "6", "--steps", "3", "--json"]
    asked += ["--warm-up", "3", "--pool", "slow=2", "duty=0.5", "--jitter", "0.03"]
    assert main(asked) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["pool"] | {"slow": 2.0, "duty": 0.5, "jitter": 0.03} == tree["pool"]
    found = tree["result"]
    assert list(found) == ["rotation", "merge", "cohort", "lockstep", "3 domains in turn"]
    assert found["rotation"]["messages"] == 1 < found["cohort"]["messages"] <= 6
    assert found["cohort"]["tokens"] > 1.2 * found["lockstep"]["tokens"]


@pytest.mark.nightly
def test_a_thousand_devices_and_a_hundred_steps_take_a_minute_of_one_core():
    """3 domains x 248 + 256 devices, 3 lanes of 8 sequences: 17,856 at a time."""
    command = [sys.executable, "-m", "jaxserve.plan", "simulate", "--config", "deepseek-v3"]
    for setting in ("attention.dp=248", "ffn.ep=256", "scheduler.slots=8"):
        command += ["--set", setting]
    command += ["--hardware", "h800", "--domains", "3", "--steps", "100", "--jitter", "0.05"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, "--skew", "0.3", "--json"],
        capture_output=True,
        text=True,
        timeout=590,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(done.stdout)["result"]
    assert result["sequences"] == pytest.approx(3 * 248 * 3 * 8, rel=0.05)
    assert result["steps"] >= 9 * 89
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds <= 60
