import json
import subprocess
import sys

from jaxserve.plan import main


def test_tables_as_text(capsys):
    assert main(["tables"]) == 0
    text = capsys.readouterr().out
    assert "tables: 211 of 212 printed cells agree to the printed digits\n" in text
    assert "Figure 5" in text


def test_tables_for_programs(capsys, tmp_path):
    assert main(["tables", "--json", "--svg", str(tmp_path / "figures")]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert [table["name"] for table in tree][:2] == ["Table 2", "Table 3"]
    assert tree[0]["rows"]["Step-3"]["cache bytes"]["value"] == 61 * 512 * 8192
    assert len(list((tmp_path / "figures").glob("*.svg"))) == 7


def test_a_folder_without_models(capsys, tmp_path):
    assert main(["tables", "--configs", str(tmp_path)]) == 2
    assert "model 'deepseek-v3' is not known" in capsys.readouterr().err


def test_planning_needs_no_jax():
    code = "import sys, jaxserve.plan; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
