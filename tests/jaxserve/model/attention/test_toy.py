"""A new kind of attention is one file and an entry for its family: served, weighed and planned."""

import json
import re
import sys
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import plan, serve
from jaxserve.calibration.forward import refuse_unsupported
from jaxserve.checkpoint.families import FAMILIES
from jaxserve.errors import ConfigError
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.models import load_model
from tests import golden
from tests.conftest import REPOSITORY
from tests.jaxserve import layouts
from tests.jaxserve.long_prompts import GREEDY
from tests.reference.decoder_numpy import Qwen3Numpy, read_folder, softmax
from tests.reference.tiny_models import TinyModel, prompts
from tests.reference.tiny_sizes import TinyQwen3

PROMPTS, LIMITS = prompts((3, 9, 37, 29, 34)), golden.sizes("kind of attention")
TOY = ModuleType("jaxserve.checkpoint.toy")
exec(golden.text("model/toy_attention.txt"), vars(TOY))


class ToyNumpy(Qwen3Numpy):
    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        name, width = f"model.layers.{layer}.self_attn.", self.config["head_dim"]
        query, row = (self.linear(f"{name}{kind}_proj", x) for kind in "qk")
        far = np.arange(len(x))[:, None] - np.arange(len(x))
        mixed = [
            softmax(np.where(far < 0, -np.inf, one @ row.T / width**0.5 - far / 2**head)) @ row
            for head, one in enumerate(np.split(query, query.shape[1] // width, axis=1))
        ]
        return self.linear(f"{name}o_proj", np.concatenate(mixed, axis=1))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the toy's family. Its file is as one in `checkpoint/`, and `FAMILIES` has the
    only line that another file gets."""
    monkeypatch.setitem(sys.modules, TOY.__name__, TOY)
    monkeypatch.setitem(FAMILIES, "toy", "toy:TOY")
    path = TinyModel("toy", TinyQwen3(num_key_value_heads=1)).write(tmp_path / "toy")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "toy"}))
    (file,) = path.glob("*.safetensors")
    unused = re.compile("v_proj|[qk]_norm")
    save_file({k: v for k, v in load_file(file).items() if not unused.search(k)}, file)
    return path


@pytest.mark.unoptimised
@pytest.mark.parametrize("layout", [{"mode": "colocated", "attention.tp": 2}, {"lanes": 2}, {}])
def test_served(folder, layout):
    """Prompts together, in chunks, two with one prefix, on too few pages; then from cached prefixes
    beside requests that are cancelled. Colocated, and 1A1F."""
    asked = [*PROMPTS, PROMPTS[2][:23] + PROMPTS[3][:9]]
    model = ToyNumpy(*read_folder(folder))
    expected = [model.greedy(prompt, GREEDY.max_tokens) for prompt in asked]
    with layouts.running(folder, LIMITS | layout) as engine:
        assert layouts.generate(engine, asked, GREEDY) == expected
        assert layouts.beside_cancels(engine, asked, asked[::2], GREEDY) == expected
        assert min(engine.load().preemptions, engine.load().domains[0].prefix_hits) > 0


def test_weighed_and_planned(folder, capsys):
    """A cached row of 16 numbers in each of 3 layers; maps of 48 columns to 4 heads, to the row and
    back."""
    pages = ("--set", "cache.page_size=16", "--set", "cache.pages=65536")
    assert serve.main(["--model", str(folder), "--check", *pages]) == 0  # which chooses the rest
    assert re.search("\nattention +1 +0.0002 +0.2013 ", capsys.readouterr().out)
    model = load_model(str(folder))
    with pytest.raises(ConfigError, match="other attention than MFA, GQA and MLA"):
        refuse_unsupported(model.config)  # which calibration would have to compute
    floats = Formats(**dict.fromkeys(("weights", "rows", "cache"), "float32"))
    maps = 48 * 64 + 48 * 16 + 64 * 48
    found = model.declared(model.attention[0].spec, floats, 1, "cpu")
    assert found == (maps, 4 * maps, 16 * 4, 0, 0)
    asked = "--hardware h100 --tpot 50ms --context 128 --max-devices 2"
    assert plan.main(["search", "--model", str(folder), *asked.split()]) == 0
    assert "cheapest: " in capsys.readouterr().out


def test_no_file_knows_a_kind_but_its_own():
    """Families and calibration are of certain kinds; so is the model of benches."""
    root, kinds = REPOSITORY / "jaxserve", ["compressed", "gated_delta", "gqa", "mfa", "mla"]
    assert sorted(path.stem for path in (root / "config/attention").glob("[!_]*.py")) == kinds
    paths = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    named = re.compile(r"config\.attention(\.| import)|\bisinstance\(.*\bAttention\b")
    found = {path for path, text in paths.items() if named.search(text)}
    others = {path for path in found if path.split("/")[0] not in ("checkpoint", "calibration")}
    assert others == {"bench/random_model.py", *(f"model/attention/{kind}.py" for kind in kinds)}
