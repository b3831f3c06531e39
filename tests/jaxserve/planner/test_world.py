"""The planner against published measurements; jaxserve/planner/README.md has the same numbers."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.plan import main
from jaxserve.planner.world import LARGE, compare, read_measurements, summary
from tests import golden


def test_errors_and_their_reasons():
    """`golden/planner/world.txt` has them all; most were fitted to nothing."""
    found = {one.measurement.name: one for one in compare()}
    layers = [one for name, one in found.items() if name.startswith("attention layer")]
    assert len(layers) == 16
    assert max(abs(one.error) for one in layers) <= 0.26
    far = [one for one in found.values() if abs(one.error) > LARGE]
    assert len(far) == 4
    assert not any(one.unexplained for one in found.values())
    free = [abs(one.error) for one in found.values() if not one.measurement.fitted]
    assert sum(free) / len(free) <= 0.201
    assert summary(list(found.values())).startswith("mean |error| 20% of 27 numbers")


def test_every_number_has_a_source_and_says_what_was_taken():
    for one in read_measurements():
        assert one.source.startswith("https://")
        assert one.given
        assert one.taken


def test_the_table(capsys, tmp_path):
    page = tmp_path / "world.html"
    assert main(["tables", "--world", "--html", str(page)]) == 0
    golden.check("planner/world.txt", capsys.readouterr().out)
    assert "https://github.com/deepseek-ai/profile-data" in page.read_text()


def test_a_wrong_file_is_named(tmp_path):
    folder = tmp_path / "world"
    folder.mkdir()
    (folder / "measurements.yaml").write_text("- {name: x, speed: 3}")
    with pytest.raises(ConfigError, match=r"measurements\.yaml: Object contains unknown field"):
        read_measurements(tmp_path)
