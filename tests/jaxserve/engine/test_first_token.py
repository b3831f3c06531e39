"""Weights that give no numbers: the engine does not start, and the block is named."""

import numpy as np
import pytest

from jaxserve.engine.build import build_engine
from jaxserve.errors import CheckpointError
from tests.jaxserve import layouts

pytestmark = pytest.mark.unoptimised


@pytest.mark.parametrize(
    ("layout", "tensor", "value", "block"),
    [
        (layouts.COLOCATED, "model.layers.1.self_attn.o_proj.weight", np.nan, "layers.1.attention"),
        ({"mode": "afd"}, "model.layers.0.mlp.down_proj.weight", np.inf, "layers.0.ffn"),
    ],
)
def test_the_block_is_named(tmp_path, layout, tensor, value, block):
    folder = layouts.write_damaged_model(tmp_path, tensor, (0, 0), value)
    with pytest.raises(CheckpointError, match=rf"logits are not finite, nor are {block}$"):
        build_engine(layouts.deployment(folder, layout))
