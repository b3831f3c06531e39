import pytest
import yaml

from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.planner import hardware
from jaxserve.planner.hardware import MEASURES, known_hardware, load_hardware
from tests import golden


@pytest.mark.parametrize("name", known_hardware())
def test_every_file_reads_and_says_where_its_figures_are_from(name):
    hardware = load_hardware(name)
    more = {"torus"} if hardware.torus else {"tile_rows"} if hardware.tile_rows > 1 else set()
    more |= {"int8_attention"} if hardware.int8_attention > 1 else set()
    assert set(hardware.sources) == {*MEASURES, *more}
    assert all(len(source) > 8 for source in hardware.sources.values())
    assert hardware.link_devices >= hardware.devices_per_host


def test_figures_in_units():
    golden.check_values("planner/figures.txt", lambda value: value, globals())


def test_figures_of_the_users(tmp_path):
    assert load_hardware("h100", {"h100": 1.9}).price == 1.9
    assert load_hardware("h100", {"h20": 1.9}).price == 2.5
    text = (CONFIGS / "hardware" / "h800.yaml").read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("price: 2.0", "price: 1.5", 1), encoding="utf-8")
    assert load_hardware(str(path)).price == 1.5
    path.write_text(f"{text}\nprice: 1.5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"key 'price' is in line \d+ already"):
        load_hardware(str(path))


def test_wrong_files_are_refused(tmp_path):
    """`golden/planner/hardware.txt` lists what is wrong in them."""
    tree = yaml.safe_load((CONFIGS / "hardware" / "h800.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "mine.yaml"

    def read(change: str) -> None:
        path.write_text(yaml.safe_dump(tree | yaml.safe_load(change)), encoding="utf-8")
        load_hardware(str(path))

    golden.check_refused("planner/hardware.txt", ConfigError, read, tmp_path)


@golden.table("planner/slices.yaml")
def test_slices(name, devices, chips, far):
    chip = load_hardware(name)
    assert chip.shape(devices) == tuple(chips)
    assert chip.hops(devices) == far


def test_bandwidths():
    """`golden/planner/fabric.txt` says which links bound each of them."""
    golden.check_values("planner/fabric.txt", lambda value: value, vars(hardware))
