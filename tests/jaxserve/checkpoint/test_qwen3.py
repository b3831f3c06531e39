"""config.json of Qwen3; `test_families.py` has what all families share."""

import json
import math
from typing import Any

import pytest

from jaxserve.checkpoint.qwen3 import qwen3_config
from jaxserve.errors import CheckpointError
from tests import golden
from tests.reference.tiny_sizes import TinyQwen3

DENSE = TinyQwen3(num_hidden_layers=4).config()
MOE = TinyQwen3(model_type="qwen3_moe", num_hidden_layers=4).config()


def test_coder():
    """Qwen3-Coder repeats what all models have."""
    more = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert qwen3_config(MOE | more) == qwen3_config(MOE)


def test_yarn_reaches_further_than_max_position_embeddings():
    """The model card has users add `rope_scaling`, and change nothing else."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = qwen3_config(DENSE | {"rope_scaling": scaling})
    assert config.max_positions == 131072
    assert config.rope.yarn.magnitude == pytest.approx(0.1 * math.log(4) + 1)


class TestVariations:
    @pytest.mark.parametrize(
        ("entries", "layers"),
        [
            ({}, {0, 1, 2, 3}),
            ({"decoder_sparse_step": 2}, {1, 3}),
            ({"decoder_sparse_step": 5}, set()),
            ({"mlp_only_layers": [0, 3]}, {1, 2}),
            ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {3}),
            ({"num_experts": 0}, set()),
        ],
    )
    def test_layers_with_experts(self, entries: dict[str, Any], layers: set[int]):
        config = qwen3_config(MOE | entries)
        assert config.moe_layers == layers
        assert (config.router is None) == (not layers)

    def test_raw_gate_weights(self):
        assert not qwen3_config(MOE | {"norm_topk_prob": False}).router.renormalise

    def test_head_dim_where_it_is_not_said(self):
        """transformers' class of the dense model has a default; the other one divides."""
        for tree, head_dim in ((DENSE, 128), (MOE, 48 // 4)):
            assert qwen3_config(tree | {"head_dim": None}).attention.head_dim == head_dim

    def test_a_dense_model_has_no_experts_whatever_it_says(self):
        config = qwen3_config(DENSE | {"moe_intermediate_size": 768})
        assert (config.experts, config.expert_d_ff) == (0, 0)


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
TYPES = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]


class TestWindow:
    @pytest.mark.parametrize(
        ("tree", "window", "layers"),
        [
            (DENSE | WINDOW, 8, {3}),
            (DENSE | WINDOW | {"max_window_layers": 0}, 8, {0, 1, 2, 3}),
            (DENSE | WINDOW | {"max_window_layers": 4}, 0, set()),
            (DENSE | WINDOW | {"use_sliding_window": False}, 0, set()),
            (DENSE | WINDOW | {"layer_types": TYPES}, 8, {1, 3}),
            (DENSE | {"layer_types": ["full_attention"] * 4}, 0, set()),
            # A model with experts has it everywhere.
            (MOE | WINDOW, 8, {0, 1, 2, 3}),
            (MOE | WINDOW | {"use_sliding_window": False}, 0, set()),
        ],
    )
    def test_layers(self, tree: dict[str, Any], window: int, layers: set[int]):
        config = qwen3_config(tree)
        assert (config.window, config.window_layers) == (window, layers)


def test_problems_are_named():
    """`golden/checkpoint/qwen3.txt` lists them."""

    def read(line: str) -> None:
        kind, entries = line.split(" ", 1)
        qwen3_config({"dense": DENSE, "moe": MOE}[kind] | json.loads(entries))

    golden.check_refused("checkpoint/qwen3.txt", CheckpointError, read)
