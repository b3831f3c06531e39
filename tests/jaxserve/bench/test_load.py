"""The bench of loading, on a small checkpoint."""

from jaxserve.bench import load
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config


def test_the_checkpoint_is_one(tmp_path):
    size = load.write_checkpoint(tmp_path, load.config_tree(True), file_bytes=1 << 20)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    checkpoint = HFCheckpoint(tmp_path, read_config(tmp_path)[1])
    assert checkpoint.size == size  # of tensors, without the headers
