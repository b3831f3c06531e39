import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.config.shipped import CONFIGS
from jaxserve.plan import main

DEPLOYMENT = """
model: {model}
lanes: 3
attention: {{dp: {dp}, weights: int8}}
ffn: {{ep: {ep}, weights: int8}}
link: {{dispatch: int8}}
cache: {{format: int8, pages: 6000, page_size: 64}}
scheduler: {{slots: {slots}, max_length: 4096, token_budget: 256}}
"""


def write(folder: Path, model: str = "qwen3-30b-a3b", dp: int = 4, ep: int = 4, slots: int = 4):
    path = folder / "deployment.yaml"
    text = DEPLOYMENT.format(model=CONFIGS / "models" / model, dp=dp, ep=ep, slots=slots)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def asked(tmp_path):
    how = "--hardware v6e --steps 8 --warm-up 2"
    return ["simulate", "--config", str(write(tmp_path)), *how.split()]


def test_as_text_page_and_timeline(capsys, asked, tmp_path):
    page, folder = tmp_path / "page.html", tmp_path / "timeline"
    more = ["--jitter", "0.1", "--html", str(page), "--timeline", str(folder)]
    assert main([*asked, *more]) == 0
    text = capsys.readouterr().out
    for part in ("TPOT ms", "tokens/s/device", "attention busy", "bubble"):
        assert part in text
    assert "as simulated" in page.read_text(encoding="utf-8")
    assert "decode only: prompts come computed from elsewhere" in text
    assert "decode only: prompts come computed from elsewhere" in page.read_text(encoding="utf-8")
    assert len(list(folder.iterdir())) == 3


def test_for_programs(capsys, asked):
    more = ["--json", "--rate", "200", "--skew", "0.5", "--stall", "0.01:1ms"]
    assert main([*asked, *more]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert set(tree) == {"scope", "traffic", "conditions", "result"}
    assert tree["scope"] == "prompts are computed here"
    assert tree["traffic"]["prefill"] == "here"
    assert tree["conditions"]["jitter"]["stall_seconds"] == 1e-3
    assert tree["result"]["ttft"]["p50"] > 0


def test_what_a_rebalance_brings(capsys, asked):
    more = ["--skew", "zipf:1.2", "--placed", "--set", "ffn.redundant_slots=2"]
    more += ["--assume", "compute=0.01", "--set", "scheduler.slots=64"]
    more += ["--steps", "3", "--warm-up", "1"]
    assert main([*asked, *more]) == 0
    rows = dict(re.findall(r"^(.*?) {2,}(\S+)", capsys.readouterr().out, re.MULTILINE))
    home, placed = (float(rows[f"balance of experts, {how}"]) for how in ("at home", "placed"))
    assert home < 0.75 < 0.95 < placed
    assert float(rows["tokens/s, placed ÷ at home"]) > 1


@pytest.mark.nightly
def test_a_thousand_devices_and_a_hundred_steps_take_a_minute_of_one_core(tmp_path):
    """3 domains x 248 + 256 devices, 3 lanes of 8 sequences: 17,856 at a time."""
    path = write(tmp_path, "deepseek-v3", dp=248, ep=256, slots=8)
    command = [sys.executable, "-m", "jaxserve.plan", "simulate", "--config", str(path), "--json"]
    command += ["--hardware", "h800", "--domains", "3", "--steps", "100", "--jitter", "0.05"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, "--skew", "0.3"], capture_output=True, text=True, timeout=590, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(done.stdout)["result"]
    assert result["sequences"] == pytest.approx(3 * 248 * 3 * 8, rel=0.05)
    assert result["steps"] >= 9 * 89
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds <= 60
