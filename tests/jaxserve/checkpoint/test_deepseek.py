"""config.json of DeepSeek-V3 and Kimi K2 in both spellings, and what is said of a wrong one."""

import math
from typing import Any

import pytest

from jaxserve.checkpoint.deepseek import deepseek_config, deepseek_names
from jaxserve.checkpoint.families import FAMILIES
from jaxserve.config.model import MLA, LayerKind, ModelConfig, Rope, Router, Yarn
from jaxserve.errors import CheckpointError
from tests.jaxserve.checkpoint.names import shapes_of
from tests.reference.tiny_sizes import TinyDeepseek

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

KIMI_K2: dict[str, Any] = DEEPSEEK_V3 | {
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}

EXPECTED_V3 = ModelConfig(
    vocab=129280,
    d_model=7168,
    layers=61,
    attention=MLA(
        q_heads=128,
        q_latent=1536,
        kv_latent=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        scale=(0.1 * math.log(40) + 1) ** 2 * 192**-0.5,
        bias=False,
        latent_epsilon=1e-6,
    ),
    rope=Rope(
        theta=10000.0,
        yarn=Yarn(
            factor=40.0, original_positions=4096, beta_fast=32.0, beta_slow=1.0, magnitude=1.0
        ),
        interleaved=True,
    ),
    d_ff=18432,
    moe_layers=frozenset(range(3, 61)),
    router=Router(
        experts=256,
        top_k=8,
        score="sigmoid",
        float32_logits=True,
        renormalise=True,
        scaling=2.5,
        bias=True,
        groups=8,
        top_groups=4,
    ),
    expert_d_ff=2048,
    shared_d_ff=2048,
    norm_epsilon=1e-6,
    max_positions=163840,
    stored="fp8_block",
    mtp_layers=1,
)

EXPECTED_K2 = ModelConfig(
    vocab=163840,
    d_model=7168,
    layers=61,
    attention=MLA(
        q_heads=64,
        q_latent=1536,
        kv_latent=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        scale=(0.1 * math.log(32) + 1) ** 2 * 192**-0.5,
    ),
    rope=Rope(
        theta=50000.0,
        yarn=Yarn(
            factor=32.0, original_positions=4096, beta_fast=1.0, beta_slow=1.0, magnitude=1.0
        ),
        interleaved=True,
    ),
    d_ff=18432,
    moe_layers=frozenset(range(1, 61)),
    router=Router(
        experts=384,
        top_k=8,
        score="sigmoid",
        float32_logits=True,
        renormalise=True,
        scaling=2.827,
        bias=True,
        groups=1,
        top_groups=1,
    ),
    expert_d_ff=2048,
    shared_d_ff=2048,
    norm_epsilon=1e-6,
    max_positions=131072,
    stored="fp8_block",
    mtp_layers=0,
)


def saved_by_transformers_5(tree: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers 5 writes it."""
    gone = ("rope_scaling", "rope_theta", "torch_dtype", "scoring_func", "topk_method")
    kept = {key: value for key, value in tree.items() if key not in gone}
    scaling = {key: value for key, value in tree["rope_scaling"].items() if key != "type"}
    return kept | {
        "dtype": "bfloat16",
        "head_dim": 64,
        "qk_head_dim": 192,
        "num_local_experts": tree["n_routed_experts"],
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": tree["rope_theta"], "rope_type": "yarn", **scaling},
        "pad_token_id": None,
        "output_router_logits": False,
        "transformers_version": "5.0.0",
    }


def changed(**entries: Any) -> dict[str, Any]:
    return DEEPSEEK_V3 | entries


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in DEEPSEEK_V3.items() if name not in names}


class TestReleased:
    def test_deepseek_v3(self):
        assert deepseek_config(DEEPSEEK_V3) == EXPECTED_V3

    def test_kimi_k2(self):
        assert deepseek_config(KIMI_K2) == EXPECTED_K2

    def test_scales(self):
        """As published by those who ran them."""
        assert EXPECTED_V3.attention.scale == pytest.approx(0.135234, abs=1e-6)
        assert EXPECTED_K2.attention.scale == pytest.approx(0.130861, abs=1e-6)

    def test_deepseek_v3_1(self):
        quantised = DEEPSEEK_V3["quantization_config"] | {"scale_fmt": "ue8m0"}
        assert deepseek_config(changed(quantization_config=quantised)) == EXPECTED_V3

    @pytest.mark.parametrize("tree", [DEEPSEEK_V3, KIMI_K2], ids=["v3", "k2"])
    def test_as_transformers_5_saves_them(self, tree: dict[str, Any]):
        assert deepseek_config(saved_by_transformers_5(tree)) == deepseek_config(tree)

    def test_a_dump_of_every_entry_that_old_transformers_knew(self):
        dump = {
            "_name_or_path": "",
            "add_cross_attention": False,
            "bad_words_ids": None,
            "chunk_size_feed_forward": 0,
            "diversity_penalty": 0.0,
            "do_sample": False,
            "early_stopping": False,
            "encoder_no_repeat_ngram_size": 0,
            "id2label": {"0": "LABEL_0"},
            "is_decoder": False,
            "label2id": {"LABEL_0": 0},
            "length_penalty": 1.0,
            "max_length": 20,
            "min_length": 0,
            "no_repeat_ngram_size": 0,
            "num_beam_groups": 1,
            "num_beams": 1,
            "num_return_sequences": 1,
            "pruned_heads": {},
            "remove_invalid_values": False,
            "repetition_penalty": 1.0,
            "return_dict": True,
            "temperature": 1.0,
            "tf_legacy_loss": False,
            "top_k": 50,
            "top_p": 1.0,
            "torchscript": False,
            "typical_p": 1.0,
            "use_bfloat16": False,
        }
        assert deepseek_config(KIMI_K2 | dump) == EXPECTED_K2

    def test_families(self):
        assert FAMILIES["deepseek_v3"] == FAMILIES["kimi_k2"] == (deepseek_config, deepseek_names)


class TestVariations:
    def test_no_low_rank_query(self):
        assert deepseek_config(changed(q_lora_rank=None)).attention.q_latent == 0

    def test_no_yarn(self):
        config = deepseek_config(changed(rope_scaling=None))
        assert config.rope == Rope(theta=10000.0, interleaved=True)
        assert config.attention.scale == 192**-0.5

    def test_yarn_without_mscale_leaves_the_scores_scale(self):
        scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
        config = deepseek_config(changed(rope_scaling=scaling))
        assert config.attention.scale == 192**-0.5
        assert config.rope.yarn.magnitude == pytest.approx(1.3688879)

    def test_every_other_layer(self):
        config = deepseek_config(changed(moe_layer_freq=2, num_hidden_layers=8))
        assert config.moe_layers == {4, 6}
        assert config.kind(5) == LayerKind("dense")

    def test_all_dense(self):
        """Such a model need not speak of experts."""
        tree = without(
            "n_routed_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "n_group",
            "topk_group",
            "routed_scaling_factor",
            "num_nextn_predict_layers",
        )
        config = deepseek_config(tree)
        assert (config.moe_layers, config.router, config.experts) == (frozenset(), None, 0)
        assert (config.expert_d_ff, config.shared_d_ff) == (0, 0)

    def test_two_shared_experts_are_one_of_twice_the_width(self):
        assert deepseek_config(changed(n_shared_experts=2)).shared_d_ff == 4096

    def test_halves_instead_of_pairs(self):
        assert not deepseek_config(changed(rope_interleave=False)).rope.interleaved

    def test_plain_numbers(self):
        assert deepseek_config(without("quantization_config")).stored == "plain"

    def test_unknown_but_switched_off(self):
        tree = changed(use_mla_gate=False, sparse_config={}, sinks=None, hooks=[])
        assert deepseek_config(tree) == EXPECTED_V3

    def test_unknown_but_the_user_knows(self):
        assert deepseek_config(changed(index_topk=2048), ["index_topk"]) == EXPECTED_V3


class TestProblems:
    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            ({"topk_method": "group_limited_greedy"}, "only 'noaux_tc'"),
            ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported, only 'noaux_tc'"),
            ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only 'sig"),
            ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
            ({"mlp_bias": True}, "mlp_bias = True is not supported, only False"),
            (
                {"rope_scaling": {"type": "linear", "factor": 2}},
                "rope_scaling = {'type': 'linear', 'factor': 2} is not supported, only yarn",
            ),
            (
                {"quantization_config": {"quant_method": "bitsandbytes"}},
                "quantization_config.quant_method = 'bitsandbytes' is not supported",
            ),
            ({"n_group": 7}, "n_group = 7 does not cut 256 experts into equal groups"),
            ({"topk_group": 9}, "topk_group = 9 of 8 groups of 32 experts cannot hold 8"),
            ({"num_experts_per_tok": 257}, "num_experts_per_tok = 257 of n_routed_experts = 256"),
            ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0 of n_routed_experts = 256"),
            ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63 is odd, and RoPE turns pairs"),
            ({"index_topk": 2048}, "index_topk = 2048 is not known, and might change"),
            ({"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes' is not true or false"),
            ({"n_routed_experts": 0}, "num_experts_per_tok = 8 of n_routed_experts = 0"),
        ],
    )
    def test_are_named(self, entries: dict[str, Any], message: str):
        with pytest.raises(CheckpointError) as error:
            deepseek_config(changed(**entries))
        assert message in str(error.value)
        assert ";" not in str(error.value) or "quantization" in message

    @pytest.mark.parametrize(
        "name",
        [
            "n_group",  # of which tools think that it is 1, or 8
            "topk_group",
            "routed_scaling_factor",  # 1, or 2.5
            "num_experts_per_tok",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "num_attention_heads",
            "rms_norm_eps",
            "rope_theta",
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "max_position_embeddings",
            "num_hidden_layers",
            "vocab_size",
        ],
    )
    def test_no_tensor_says_what_a_missing_number_was(self, name: str):
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            deepseek_config(without(name))

    def test_are_told_all_at_once(self):
        with pytest.raises(CheckpointError) as error:
            deepseek_config(changed(hidden_size="x", kv_lora_rank=None, rms_norm_eps=0))
        assert str(error.value) == (
            "config.json: hidden_size = 'x' is not a whole number from 1; "
            "kv_lora_rank is missing; rms_norm_eps = 0 is not a number above 0"
        )

    def test_what_is_not_supported_is_told_all_at_once(self):
        with pytest.raises(CheckpointError) as error:
            deepseek_config(changed(topk_method="greedy", hidden_act="relu", soft_cap=30))
        assert str(error.value) == (
            "config.json: hidden_act = 'relu' is not supported, only 'silu'; topk_method = "
            "'greedy' is not supported, only 'noaux_tc'; soft_cap = 30 is not known, and might "
            "change what the model computes"
        )


class TestNames:
    """The writer of tiny checkpoints has its own list of what they hold."""

    @pytest.mark.parametrize(
        "sizes",
        [
            TinyDeepseek(),
            TinyDeepseek(q_lora_rank=None),
            TinyDeepseek(attention_bias=True),
            TinyDeepseek(attention_bias=True, q_lora_rank=None),
            TinyDeepseek(n_shared_experts=2, first_k_dense_replace=0),
            TinyDeepseek(first_k_dense_replace=3),
            TinyDeepseek(moe_layer_freq=2, num_hidden_layers=4),
            TinyDeepseek(num_nextn_predict_layers=2),
        ],
        ids=["plain", "query", "biases", "both", "shared", "dense", "every other", "mtp"],
    )
    def test_are_those_of_the_file(self, sizes: TinyDeepseek):
        names = deepseek_names(deepseek_config(sizes.config()))
        copies = {name for name in sizes.shapes() if "inv_freq" not in name} & set(names.optional)
        assert shapes_of(names) | {name: names.optional[name] for name in copies} == sizes.shapes()

    def test_copies_and_frequencies_may_be_there(self):
        sizes = TinyDeepseek(num_nextn_predict_layers=1)
        assert deepseek_names(deepseek_config(sizes.config())).optional == {
            "model.layers.3.embed_tokens.weight": (97, 48),
            "model.layers.3.shared_head.head.weight": (97, 48),
            **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (4,) for i in range(4)},
        }

    def test_a_tied_head_is_the_embedding(self):
        tree = TinyDeepseek(tie_word_embeddings=True).config()
        names = deepseek_names(deepseek_config(tree))
        assert names.head["weight"].names == ("model.embed_tokens.weight",)

    def test_keys_and_values_are_parts_of_one_tensor(self):
        """kv_b_proj holds, head by head, the rows of W^UK (16) and of W^UV (12)."""
        attention = deepseek_names(deepseek_config(TinyDeepseek().config())).attention[0]
        key, value = attention["attention.key_up"], attention["attention.value_up"]
        assert key.names == value.names == ("model.layers.0.self_attn.kv_b_proj.weight",)
        assert key.shapes == value.shapes == ((4 * 28, 32),)
        assert key.view == ((4, 28, 32), 1, 0, 16)
        assert value.view == ((4, 28, 32), 1, 16, 28)

    def test_released(self):
        """Sizes as published (facts of the files on the Hub)."""
        shapes = shapes_of(deepseek_names(EXPECTED_V3))
        assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
        assert shapes["model.layers.0.self_attn.kv_b_proj.weight"] == (32768, 512)
        assert shapes["model.layers.60.mlp.experts.255.down_proj.weight"] == (7168, 2048)
        assert shapes["model.layers.61.eh_proj.weight"] == (7168, 14336)
        assert "model.layers.2.mlp.gate.weight" not in shapes
        parameters = sum(
            math.prod(shape)
            for name, shape in shapes.items()
            if not name.startswith("model.layers.61.")
        )
        assert round(parameters / 1e9, 1) == 671.0
