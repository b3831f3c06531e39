"""config.json of Qwen3; `test_families.py` has what all families share."""

import json

from jaxserve.checkpoint.qwen3 import qwen3_config
from jaxserve.errors import CheckpointError
from tests import golden
from tests.reference.tiny_sizes import TinyQwen3

DENSE = TinyQwen3(num_hidden_layers=4).config()
MOE = TinyQwen3(model_type="qwen3_moe", num_hidden_layers=4).config()


def test_problems_are_named():
    """`golden/checkpoint/qwen3.txt` lists them."""

    def read(line: str) -> None:
        kind, entries = line.split(" ", 1)
        qwen3_config({"dense": DENSE, "moe": MOE}[kind] | json.loads(entries))

    golden.check_refused("checkpoint/qwen3.txt", CheckpointError, read)
