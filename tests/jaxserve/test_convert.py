"""`python -m jaxserve.convert` from end to end: the converted model answers as the original."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import convert, serve
from jaxserve.checkpoint.conversion import CALIBRATION
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.int8_products import read_model
from jaxserve.checkpoint.manifest import BLOCKS, read_manifest
from jaxserve.checkpoint.store import open_blocks
from jaxserve.config.model import Int4
from jaxserve.engine.request import SamplingParams
from jaxserve.storage.mirror import INT8_PRODUCTS
from tests.conftest import REPOSITORY
from tests.jaxserve import layouts
from tests.jaxserve.checkpoint.packed_folders import FORMATS as PACKED
from tests.jaxserve.checkpoint.packed_folders import write as write_packed
from tests.jaxserve.checkpoint.test_fp8 import MODEL as FP8_MODEL
from tests.reference.catalogue import CATALOGUE
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import TinyStep3p5
from tests.reference.tiny_step3 import write_tiny_step3

pytestmark = pytest.mark.unoptimised

PROMPTS = [[5, 9, 3, 7], [11, 2], [4] * 9]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LAYOUTS = {
    "1A1F": {"mode": "afd"},
    "2A2F": {"mode": "afd", "attention.tp": 2, "ffn.ep": 2, "lanes": 2},
    "colocated": {"mode": "colocated"},
}
CONVERTED = [(None, "2A2F"), ("int8", "1A1F")]
"""Weights, and the layout that then reads them."""


def tokens(folder: Path, overrides: dict[str, object]) -> list[list[int]]:
    with layouts.running(folder, overrides) as engine:
        return layouts.generate(engine, PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def original(colocated_runtime):
    """Answers of the original, with plain weights."""
    with layouts.serving(colocated_runtime) as engine:
        return layouts.generate(engine, PROMPTS, GREEDY)


@pytest.mark.parametrize(("weights", "layout"), CONVERTED)
def test_answers_as_the_original(weights, layout, tmp_path, tiny_model, original):
    target = tmp_path / "converted"
    arguments = [str(tiny_model), str(target)] + (["--weights", weights] if weights else [])
    assert convert.main(arguments) == 0
    expected = original
    if weights:
        asked = {"attention.weights": weights, "ffn.weights": weights, "mode": "colocated"}
        expected = tokens(tiny_model, asked)
    assert tokens(target, LAYOUTS[layout]) == expected


def test_fp8_blocks_answer_as_the_original(tmp_path):
    folder = FP8_MODEL.write(tmp_path / "source")
    assert convert.main([str(folder), str(tmp_path / "converted")]) == 0
    colocated = LAYOUTS["colocated"]
    assert serve.main(["--model", str(tmp_path / "converted"), "--check"]) == 0
    assert tokens(tmp_path / "converted", colocated) == tokens(folder, colocated)


@pytest.mark.nightly
def test_int4_groups_answer_as_the_original(tmp_path):
    """AWQ's, with zero points, cut over four devices."""
    awq, pack = PACKED["awq"]
    write_packed(tmp_path / "source", awq, pack)
    assert convert.main([str(tmp_path / "source"), str(tmp_path / "converted")]) == 0
    assert read_config(tmp_path / "converted")[0] == read_config(tmp_path / "source")[0]
    expected = tokens(tmp_path / "source", LAYOUTS["colocated"])
    assert tokens(tmp_path / "converted", LAYOUTS["2A2F"]) == expected


@pytest.mark.nightly
def test_floats_become_int4_there_and_here(tmp_path, tiny_model):
    """A conversion rounds FFNs as loading does, and leaves attention alone."""
    options = [str(tiny_model), str(tmp_path / "int4"), "--weights", "int4"]
    assert convert.main(options) == 0
    expected = tokens(tiny_model, {"mode": "colocated", "ffn.weights": "int4"})
    assert tokens(tmp_path / "int4", LAYOUTS["1A1F"]) == expected


def test_calibrates_int4_groups(tmp_path, capsys):
    folder, target = CATALOGUE["kimi_k2"].write(tmp_path / "source"), tmp_path / "target"
    text = tmp_path / "text"
    text.write_text("7 2 9 4 3 8 " * 8)
    options = ["--weights", "int4", "--calibrate", str(text), "--group", "32"]
    assert convert.main([str(folder), str(target), *options]) == 0
    assert convert.main(["--verify", str(target)]) == 0
    config, names = read_config(target)
    assert (config.stored, config.int4, config.plain_parts) == ("int4", Int4(32), {"attention"})
    arrays, problems = open_blocks(target, read_manifest(target), names)
    assert problems == []
    gate, block = arrays["layers.1.ffn"]["experts.gate.values"], arrays["layers.1.attention"]
    assert (gate.dtype, gate.nbytes) == ("int4", math.prod(gate.shape) // 2)
    assert block["attention.out"].dtype == "float32"
    assert convert.main([str(folder), str(target), *options[:-1], "64"]) == 2
    assert "is of another conversion: int4 Int4(group=32, " in capsys.readouterr().err


def test_groups_are_not_made_of_other_groups(tmp_path, capsys):
    write_packed(tmp_path / "source", *PACKED["w4a16"])
    options = [str(tmp_path / "source"), str(tmp_path / "target"), "--weights", "int4"]
    assert convert.main(options) == 2
    assert "is in INT4 already, in groups of 32, and not 128" in capsys.readouterr().err


def test_says_what_it_does(tmp_path, caplog, capsys):
    folder = write_tiny_step3(tmp_path / "source")
    target = tmp_path / "target"
    with caplog.at_level("INFO", "jaxserve.progress"):
        assert convert.main([str(folder), str(target)]) == 0
    assert caplog.messages[-1].startswith("convert: 10 of 10, 1.04 of 1.04 MB, ")
    assert convert.main(["--verify", str(target)]) == 0
    assert convert.main([str(folder), str(target), "--weights", "fp8"]) == 2
    assert "is of another conversion: weights plain, and not fp8" in capsys.readouterr().err
    path = next((target / BLOCKS / "head" / "norm" / "c").rglob("[0-9]*"))
    path.write_bytes(bytes(len(path.read_bytes())))
    assert convert.main(["--verify", str(target)]) == 1
    assert f"convert: {target}: head: norm: " in capsys.readouterr().err


def test_calibrates_on_a_text(tmp_path, capsys):
    """Sixteen tokens for six experts, and two of them are to be seen by each."""
    folder, target = CATALOGUE["kimi_k2"].write(tmp_path / "source"), tmp_path / "target"
    text = tmp_path / "text"
    text.write_text("7 2 9 4 3 8 " * 2 + "5 6 7 2")
    options = ["--weights", "int8", "--calibrate", str(text), "--expert-samples", "2"]
    assert convert.main([str(folder), str(target), *options]) == 0
    few = capsys.readouterr().out.splitlines()[:-1]
    assert few
    assert all("of 16 tokens fewer than 2 chose expert" in line for line in few)
    reports = json.loads((target / CALIBRATION).read_text())["layers"]
    assert [report["tokens"] for report in reports] == [16, 16, 16]
    assert sum(bool(report["rounded"]) for report in reports) == len(few)
    assert convert.main(["--verify", str(target)]) == 0
    config, names = read_config(target)
    assert config.stored == "int8"
    arrays, problems = open_blocks(target, read_manifest(target), names)
    assert problems == []
    assert arrays["layers.1.ffn"]["experts.gate.values"].dtype == "int8"
    text.write_text("2 2 2")
    assert convert.main([str(folder), str(target), *options]) == 2
    assert "is of another conversion: calibration " in capsys.readouterr().err
    text.write_text("2")
    assert convert.main([str(folder), str(tmp_path / "other"), *options]) == 2
    assert f"{text}: 1 tokens, calibration needs at least 2" in capsys.readouterr().err


def test_calibration_refuses_what_it_does_not_compute(tmp_path, capsys):
    folder, text = TinyModel("step3p5", TinyStep3p5()).write(tmp_path / "source"), tmp_path / "text"
    text.write_text("7 2 9 4")
    said = "does not compute gates of heads, limits of SwiGLU, heads of prediction modules"
    made = [str(folder), str(tmp_path / "target"), "--weights", "int8"]
    for options in (made, ["--int8-products", str(folder)]):
        assert convert.main([*options, "--calibrate", str(text)]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "target").exists()
    assert not (folder / INT8_PRODUCTS).exists()


def test_measures_which_layers_bear_products_in_int8(tmp_path, capsys):
    """Folder of a DeepSeek: expert groups, biased scores, low-rank queries, an MTP module."""
    folder = CATALOGUE["deepseek_v3"].write(tmp_path / "source")
    text = tmp_path / "text"
    text.write_text("7 2 9")
    options = ["--int8-products", str(folder), "--calibrate", str(text)]
    assert convert.main(options) == 2
    assert f"{text}: 3 tokens; two sequences of 2 or more" in capsys.readouterr().err
    text.write_text(" ".join(str(2 + n * n % 11) for n in range(48)))
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"surprise": 1}))
    assert convert.main([*options, "--budget", "50", "--ignore-key", "surprise"]) == 0
    found = json.loads((folder / INT8_PRODUCTS).read_text())
    alone = found["measured"]["alone"]
    assert [one["layers"] for one in alone] == [[0], [1], [2]]
    assert all(1e-9 < one["divergence"] < 1e-2 for one in alone)
    assert found["measured"]["together"]["layers"] == [0, 1, 2]
    assert "these" in capsys.readouterr().out
    keys = {"cache.format": "int8", "ignored_model_keys": ["surprise"]}
    wanted = layouts.deployment(folder, keys | {"attention.int8_products": "auto"})
    assert all(kind.int8_products for kind in read_model(wanted)[0].decoder)


def test_no_model(tmp_path, capsys):
    assert convert.main([str(tmp_path / "none"), str(tmp_path / "target")]) == 2
    assert "convert: no model at" in capsys.readouterr().err
    assert convert.main(["--verify", str(tmp_path)]) == 2
    assert "neither manifest.json nor weight files" in capsys.readouterr().err


def test_a_process_that_is_killed_and_started_again(tmp_path):
    folder = write_tiny_step3(tmp_path / "source", shards=2)
    target = tmp_path / "target"
    command = [sys.executable, "-m", "jaxserve.convert", str(folder), str(target)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    ) as run:
        for _ in range(6000):
            if len(list(target.glob(f"{BLOCKS}/*.json"))) >= 2 or run.poll() is not None:
                break
            try:
                run.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
        run.kill()
    finished = run.returncode == 0
    assert convert.main([str(folder), str(target)]) == 0
    assert convert.main(["--verify", str(target)]) == 0
    assert len(json.loads((target / "manifest.json").read_text())["blocks"]) == 10
    assert finished or run.returncode < 0
