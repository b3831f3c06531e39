"""The bench of loading, on a small checkpoint."""

import pytest

from jaxserve.bench import load
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config


def test_the_checkpoint_is_one(tmp_path):
    size = load.write_checkpoint(tmp_path, load.config_tree(True), file_bytes=1 << 20)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    checkpoint = HFCheckpoint(tmp_path, read_config(tmp_path)[1])
    assert checkpoint.size == size  # of tensors, without the headers


@pytest.mark.nightly
def test_measures_every_way_as_a_multiple_of_cat():
    (part,) = load.measure(True)
    assert [m.name for m in part.measures if m.limit == 2.5] == ["1A1F ÷ cat", "colocated ÷ cat"]
    assert [m.name for m in part.measures if m.limit == 2.0] == ["convert ÷ load"]
    rounds = {way: len(seconds) for way, seconds in part.details["seconds"].items()}
    expected = {"cat": 8, "cp, sync": 2, "1A1F": 2, "colocated": 2, "convert": 2}
    assert rounds == expected | {"converted, 1A1F": 2}
    assert all(m.value > 0 for m in part.measures)
