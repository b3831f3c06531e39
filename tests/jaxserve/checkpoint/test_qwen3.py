"""config.json of Qwen3 in both spellings, and what is said of a wrong one."""

import math
from typing import Any

import pytest

from jaxserve.checkpoint.families import FAMILIES
from jaxserve.checkpoint.qwen3 import qwen3_config, qwen3_names
from jaxserve.config.model import GQA, LayerKind, ModelConfig, Rope, Router
from jaxserve.errors import CheckpointError
from tests.jaxserve.checkpoint.names import shapes_of
from tests.reference.tiny_sizes import TinyQwen3

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 25600,
    "max_position_embeddings": 40960,
    "max_window_layers": 64,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Qwen3-32B."""

MOE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
}
"""Qwen3-235B-A22B."""

SMALL_MOE = MOE | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
}
"""Qwen3-30B-A3B."""

EXPECTED_DENSE = ModelConfig(
    vocab=151936,
    d_model=5120,
    layers=64,
    attention=GQA(q_heads=64, kv_heads=8, head_dim=128, qk_norm=True),
    rope=Rope(theta=1e6),
    d_ff=25600,
    norm_epsilon=1e-6,
    max_positions=40960,
)

EXPECTED_MOE = ModelConfig(
    vocab=151936,
    d_model=4096,
    layers=94,
    attention=GQA(q_heads=64, kv_heads=4, head_dim=128, qk_norm=True),
    rope=Rope(theta=1e6),
    d_ff=12288,
    moe_layers=frozenset(range(94)),
    router=Router(experts=128, top_k=8, score="softmax", renormalise=True),
    expert_d_ff=1536,
    norm_epsilon=1e-6,
    max_positions=40960,
)

EXPECTED_SMALL_MOE = ModelConfig(
    vocab=151936,
    d_model=2048,
    layers=48,
    attention=GQA(q_heads=32, kv_heads=4, head_dim=128, qk_norm=True),
    rope=Rope(theta=1e6),
    d_ff=6144,
    moe_layers=frozenset(range(48)),
    router=Router(experts=128, top_k=8, score="softmax", renormalise=True),
    expert_d_ff=768,
    norm_epsilon=1e-6,
    max_positions=40960,
)


def saved_by_transformers_5(tree: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers 5 writes it."""
    gone = ("rope_scaling", "rope_theta", "torch_dtype", "num_experts")
    kept = {key: value for key, value in tree.items() if key not in gone}
    new = {
        "dtype": "bfloat16",
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "transformers_version": "5.0.0",
    }
    if tree["model_type"] == "qwen3_moe":
        return kept | new | {"num_local_experts": tree["num_experts"]}
    return kept | new | {"layer_types": ["full_attention"] * tree["num_hidden_layers"]}


class TestReleased:
    @pytest.mark.parametrize(
        ("tree", "expected"),
        [(DENSE, EXPECTED_DENSE), (MOE, EXPECTED_MOE), (SMALL_MOE, EXPECTED_SMALL_MOE)],
        ids=["32B", "235B", "30B"],
    )
    def test_both_spellings(self, tree: dict[str, Any], expected: ModelConfig):
        assert qwen3_config(tree) == expected
        assert qwen3_config(saved_by_transformers_5(tree)) == expected

    def test_fp8(self):
        blocks = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
        assert qwen3_config(MOE | {"quantization_config": blocks}).stored == "fp8_block"

    def test_coder(self):
        """Qwen3-Coder says what is so in all of them."""
        more = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
        assert qwen3_config(SMALL_MOE | more) == EXPECTED_SMALL_MOE

    def test_yarn_reaches_further_than_max_position_embeddings(self):
        """The model card has users add `rope_scaling`, and change nothing else."""
        scaling = {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        }
        config = qwen3_config(DENSE | {"rope_scaling": scaling})
        assert config.max_positions == 131072
        assert config.rope.yarn.magnitude == pytest.approx(0.1 * math.log(4) + 1)

    def test_families(self):
        assert FAMILIES["qwen3"] == FAMILIES["qwen3_moe"] == (qwen3_config, qwen3_names)


class TestVariations:
    def test_biases(self):
        attention = qwen3_config(DENSE | {"attention_bias": True}).attention
        assert (attention.qkv_bias, attention.out_bias) == (True, True)

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
        config = qwen3_config(MOE | {"num_hidden_layers": 4} | entries)
        assert config.moe_layers == layers
        assert (config.router is None) == (not layers)

    def test_raw_gate_weights(self):
        assert not qwen3_config(MOE | {"norm_topk_prob": False}).router.renormalise

    def test_head_dim_where_it_is_not_said(self):
        """transformers' class of the dense model has a default, that of the other one divides."""
        for tree, head_dim in ((DENSE, 128), (MOE, 4096 // 64)):
            config = qwen3_config({k: v for k, v in tree.items() if k != "head_dim"})
            assert config.attention.head_dim == head_dim

    def test_a_dense_model_has_no_experts_whatever_it_says(self):
        config = qwen3_config(DENSE | {"moe_intermediate_size": 768})
        assert (config.experts, config.expert_d_ff) == (0, 0)

    def test_the_user_knows(self):
        assert qwen3_config(DENSE | {"note": 1}, ["note"]) == EXPECTED_DENSE


FOUR = {"num_hidden_layers": 4}
WINDOW = FOUR | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
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
            (DENSE | FOUR | {"layer_types": ["full_attention"] * 4}, 0, set()),
            # A model with experts has it everywhere.
            (MOE | WINDOW, 8, {0, 1, 2, 3}),
            (MOE | WINDOW | {"use_sliding_window": False}, 0, set()),
        ],
    )
    def test_layers(self, tree: dict[str, Any], window: int, layers: set[int]):
        config = qwen3_config(tree)
        assert (config.window, config.window_layers) == (window, layers)

    def test_kinds(self):
        config = qwen3_config(DENSE | WINDOW)
        assert config.kinds() == [LayerKind("dense"), LayerKind("dense", 8)]
        assert config.runs() == [(LayerKind("dense"), 0, 3), (LayerKind("dense", 8), 3, 4)]


class TestProblems:
    @pytest.mark.parametrize(
        ("tree", "message"),
        [
            (DENSE | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
            (DENSE | {"use_qk_norm": False}, "use_qk_norm = False is not supported, only True"),
            (DENSE | {"qkv_bias": True}, "qkv_bias = True is not supported, only False"),
            (
                MOE | {"shared_expert_intermediate_size": 512},
                "shared_expert_intermediate_size = 512 is not supported, only 0",
            ),
            (
                DENSE | {"num_key_value_heads": 7},
                "num_attention_heads = 64 is no multiple of num_key_value_heads = 7",
            ),
            (MOE | {"num_experts_per_tok": 129}, "num_experts_per_tok = 129 of num_experts = 128"),
            (MOE | {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
            (MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
            (MOE | {"mlp_only_layers": [0.5]}, "mlp_only_layers = [0.5] is not a list of layers"),
            (
                DENSE | {"rope_scaling": {"type": "dynamic"}},
                "rope_scaling = {'type': 'dynamic'} is not supported, only yarn",
            ),
            (DENSE | WINDOW | {"sliding_window": None}, "sliding_window is missing"),
            (
                DENSE | WINDOW | {"sliding_window": 0},
                "sliding_window = 0 is not a whole number from 1",
            ),
            (
                DENSE | WINDOW | {"use_sliding_window": False, "layer_types": TYPES},
                "layer_types has sliding_attention, but use_sliding_window is not true",
            ),
            (
                DENSE | {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
                "layer_types = ['chunked_attention'] is not one of ('full_attention', "
                "'sliding_attention') for each of 1 layers",
            ),
            (
                DENSE | {"num_hidden_layers": 2, "layer_types": ["full_attention"]},
                "layer_types = ['full_attention'] is not one of ('full_attention', "
                "'sliding_attention') for each of 2 layers",
            ),
            (
                DENSE | {"num_hidden_layers": 1, "layer_types": [["full_attention"]]},
                "layer_types = [['full_attention']] is not one of ('full_attention', "
                "'sliding_attention') for each of 1 layers",
            ),
            (
                MOE | {"dual_chunk_attention_config": {"chunk_size": 262144}},
                "dual_chunk_attention_config = {'chunk_size': 262144} is not known, and might "
                "change what the model computes",
            ),
        ],
    )
    def test_are_named(self, tree: dict[str, Any], message: str):
        with pytest.raises(CheckpointError) as error:
            qwen3_config(tree)
        assert str(error.value) == f"config.json: {message}"

    def test_are_told_all_at_once(self):
        with pytest.raises(CheckpointError) as error:
            qwen3_config(DENSE | {"hidden_act": "relu", "num_key_value_heads": 7, "a": 1})
        assert str(error.value) == (
            "config.json: hidden_act = 'relu' is not supported, only 'silu'; "
            "num_attention_heads = 64 is no multiple of num_key_value_heads = 7; "
            "a = 1 is not known, and might change what the model computes"
        )


class TestNames:
    """The writer of tiny checkpoints has its own list of what they hold."""

    @pytest.mark.parametrize(
        "sizes",
        [
            TinyQwen3(),
            TinyQwen3(attention_bias=True),
            TinyQwen3(tie_word_embeddings=True),
            TinyQwen3(model_type="qwen3_moe"),
            TinyQwen3(model_type="qwen3_moe", decoder_sparse_step=2, mlp_only_layers=(1,)),
            TinyQwen3(model_type="qwen3_moe", attention_bias=True, num_key_value_heads=1),
        ],
        ids=["dense", "biases", "tied", "moe", "some moe", "moe biases"],
    )
    def test_are_those_of_the_file(self, sizes: TinyQwen3):
        assert shapes_of(qwen3_names(qwen3_config(sizes.config()))) == sizes.shapes()

    def test_a_tied_models_file_may_repeat_the_head(self):
        names = qwen3_names(qwen3_config(TinyQwen3(tie_word_embeddings=True).config()))
        assert names.head["weight"].names == ("model.embed_tokens.weight",)
        assert names.optional == {"lm_head.weight": (97, 48)}

    def test_released(self):
        """235.1 and 30.5 and 32.8 billion parameters, as published."""
        counts = [
            sum(math.prod(shape) for shape in shapes_of(qwen3_names(config)).values())
            for config in (EXPECTED_MOE, EXPECTED_SMALL_MOE, EXPECTED_DENSE)
        ]
        assert [round(count / 1e9, 1) for count in counts] == [235.1, 30.5, 32.8]
