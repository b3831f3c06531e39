import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from jaxserve.config.load import load_deployment
from jaxserve.errors import ConfigError
from jaxserve.plan import main
from tests import golden

SEARCH = ["search", "--model", "qwen3-30b-a3b", "--context", "4K", "--max-devices", "8"]


@pytest.mark.parametrize("form", ["text", "json", "html"])
def test_what_is_about_decoding_alone_says_so(capsys, tmp_path, form):
    path = tmp_path / "page.html"
    asked = {"text": [], "json": ["--json"], "html": ["--html", str(path)]}[form]
    assert main([*SEARCH, "--hardware", "h20", "--tpot", "100ms", *asked]) == 0
    said = capsys.readouterr().out
    assert "decode only" in (path.read_text(encoding="utf-8") if form == "html" else said)


def test_a_folder_without_models(capsys, tmp_path):
    assert main([*SEARCH, "--hardware", "v6e", "--tpot", "50ms", "--configs", str(tmp_path)]) == 2
    assert "'v6e' is not known" in capsys.readouterr().err


def test_planning_needs_no_jax():
    code = "import sys, jaxserve.plan; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class TestSearch:
    def test_as_text(self, capsys):
        assert main([*SEARCH, "--hardware", "v6e", "--tpot", "50ms"]) == 0
        text = capsys.readouterr().out
        for part in (
            *("AFD\n", "colocated EP\n", "colocated TP\n", "cheapest: "),
            *("decode only: prompts come computed", "USD/month", "not verified since"),
            "price of v6e: 2.7 USD an accelerator and hour, 1,971 a month of 730 hours (https://",
        ):
            assert part in text

    def test_for_programs(self, capsys):
        assert main([*SEARCH, "--hardware", "v6e", "--tpot", "50ms", "--json", "--best", "2"]) == 0
        tree = json.loads(capsys.readouterr().out)
        rest = {"assumptions", "measured_over_predicted"}
        assert set(tree) == {"scope", "prices", "best", "front", *rest}
        assert tree["scope"].startswith("decode only")
        for plan in tree["best"]:
            assert plan["tpot_seconds"] <= 0.05
            assert set(plan["stages"]) == {"attend", "dispatch", "ffn", "combine"}
        assert {plan["mode"] for plan in tree["best"]} == {"afd", "ep", "tp"}

    def test_the_written_deployment_loads(self, capsys, tmp_path):
        path, picture, html = (tmp_path / name for name in ("plan.yaml", "front.svg", "plan.html"))
        asked = [*SEARCH, "--hardware", "h100", "--tpot", "50ms", "--modes", "afd"]
        assert main([*asked, "--write", str(path), "--svg", str(picture), "--html", str(html)]) == 0
        deployment = load_deployment(path)
        assert deployment.mode == "afd"
        assert deployment.devices <= 8
        assert "target 50 ms" in picture.read_text(encoding="utf-8")
        ElementTree.fromstring(picture.read_text(encoding="utf-8"))
        assert picture.read_text(encoding="utf-8").strip() in html.read_text(encoding="utf-8")

    def test_a_deployment_that_serve_would_refuse_is_not_written(
        self, capsys, tmp_path, monkeypatch
    ):
        def refuse(config, deployment, memory, sizes):
            raise ConfigError("the deployment does not fit")

        monkeypatch.setattr("jaxserve.roles.capacity.check_capacity", refuse)
        path = tmp_path / "plan.yaml"
        asked = [*SEARCH, "--hardware", "h100", "--tpot", "50ms", "--modes", "afd"]
        assert main([*asked, "--write", str(path)]) == 2
        assert "the deployment does not fit" in capsys.readouterr().err
        assert not path.exists()

    def test_a_mix_of_hardware_and_a_price(self, capsys):
        asked = ["--attention-hardware", "h20", "--ffn-hardware", "h800", "h100", "--json"]
        assert main([*SEARCH, *asked, "--tpot", "50ms", "--price", "h100=0.1"]) == 0
        tree = json.loads(capsys.readouterr().out)
        assert {(plan["attention"], plan["ffn"]) for plan in tree["best"]} == {("h20", "h100")}

    def test_what_is_wrong_is_named(self, capsys):
        """`golden/planner/wrong_searches.txt` lists searches."""

        def said(asked: str) -> str:
            assert main([*SEARCH, *asked.split()]) == 2
            return capsys.readouterr().err

        golden.check_each("planner/wrong_searches.txt", said)

    def test_an_impossible_target(self, capsys):
        assert main([*SEARCH, "--hardware", "h100", "--tpot", "1ms"]) == 1
        error = capsys.readouterr().err
        assert "no layout reaches 1 ms a token" in error
        assert "what would meet it: a TPOT of " in error

    def test_the_engine_cannot_serve_every_model_that_can_be_planned(self, capsys, tmp_path):
        asked = ["search", "--model", "pangu-pro-moe", "--hardware", "910b", "--context", "4K"]
        asked += ["--tpot", "50ms", "--max-devices", "8"]
        assert main(asked) == 0
        assert main([*asked, "--write", str(tmp_path / "plan.yaml")]) == 2
        assert "the engine cannot run pangu-pro-moe" in capsys.readouterr().err
