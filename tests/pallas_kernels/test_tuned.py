"""Tables of tuned tiles: what a kernel gets for a call."""

import json
from typing import NamedTuple

import pytest

from pallas_kernels import tuned
from pallas_kernels.grouped_matmul.tiles import HopperTiles, hopper_tiles
from pallas_kernels.grouped_matmul.tiles import tpu_tiles as grouped_tiles


class Tiles(NamedTuple):
    rows: int = 64
    steps: tuple[int, ...] = (16,)


TABLE = {"TPU v9": {"call": {"tiles": {"steps": [32, 8]}, "how": "timed"}}}


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(tuned, "table", lambda op: TABLE if op == "an_op" else {})


def ask(op="an_op", kind="TPU v9", call="call"):
    return tuned.in_force(op, kind, call, Tiles(), {"rows": (64, 128)})


@pytest.mark.usefixtures("table")
def test_the_table_goes_before_the_default():
    assert ask() == Tiles(64, (32, 8))
    assert ask(kind="TPU v8") == ask(call="another") == ask(op="another") == Tiles()


@pytest.mark.usefixtures("table")
def test_forced_tiles_go_before_the_table_and_are_recorded():
    with tuned.recording() as calls, tuned.use_tiles({"call": {"rows": 128}}):
        assert ask() == Tiles(128, (16,))
    default = {"rows": 64, "steps": (16,)}
    asked = tuned.Asked("an_op", default, default | {"rows": 128}, {"rows": (64, 128)})
    assert calls == {"call": asked}
    assert ask() == Tiles(64, (32, 8))


def test_an_unknown_field_is_named():
    with tuned.use_tiles({"call": {"row": 1}}):
        with pytest.raises(ValueError, match=r"no field 'row'; known: \['rows', 'steps'\]"):
            ask()


def test_entries_are_written_in_order(tmp_path):
    path = tmp_path / "not there yet" / "tuned.json"
    tuned.write_entry(path, "TPU v9", "b", {"tiles": {"rows": 8}})
    tuned.write_entry(path, "TPU v9", "a", {"tiles": {"rows": 4}})
    tuned.write_entry(path, "TPU v8", "a", {"tiles": {"rows": 2}})
    found = json.loads(path.read_text())
    assert list(found) == ["TPU v8", "TPU v9"]
    assert list(found["TPU v9"]) == ["a", "b"]


def test_hopper_tiles_are_tuned_by_call():
    call = "grouped_swiglu 7168->640 int8"
    with tuned.recording() as calls, tuned.use_tiles({call: {"band": 4}}):
        found = hopper_tiles("NVIDIA H200", "int8", 2, (7168, 640))
    assert found == HopperTiles((16, 32, 64, 128), band=4)
    assert list(calls) == [call]
    assert "band" in calls[call].choices


@pytest.mark.parametrize(
    ("format", "field"),
    [("bfloat16", "steps"), ("int8", "steps"), ("fp8", "fp8_steps"), ("fp8 blocks", "block_steps")],
)
def test_steps_are_those_of_the_format(format, field):
    """A search varies the field that the format reads, and no other one's."""
    with tuned.recording() as calls:
        tiles, steps = grouped_tiles("TPU v5 lite", 1, (640, 7168), format)
    assert steps == getattr(tiles, field)
    (asked,) = calls.values()
    assert [name for name in asked.choices if name.endswith("steps")] == [field]
