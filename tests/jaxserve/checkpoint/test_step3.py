"""config.json of Step-3 in all its spellings, and what is said of a wrong one."""

import math

import pytest

from jaxserve.checkpoint.step3 import step3_config, step3_names
from jaxserve.config.model import MFA, ModelConfig, Rope, Router
from jaxserve.errors import CheckpointError
from tests.jaxserve.checkpoint.names import shapes_of
from tests.reference.tiny_step3 import TinyStep3

CONFIG = TinyStep3().config()


def changed(**entries):
    """The tiny model's entries with these; None takes an entry away."""
    tree = CONFIG | entries
    return {name: value for name, value in tree.items() if value is not None}


EXPECTED = ModelConfig(
    vocab=160,
    d_model=64,
    layers=4,
    attention=MFA(q_heads=4, kv_heads=1, head_dim=32, latent=48),
    rope=Rope(theta=10_000.0),
    d_ff=96,
    moe_layers=frozenset({1, 2}),
    router=Router(experts=8, top_k=3, renormalise=False),
    expert_d_ff=32,
    shared_d_ff=40,
    norm_epsilon=1e-5,
    max_positions=2048,
    tied_head=False,
    mtp_layers=0,
)


class TestSpellings:
    def test_text_model(self):
        assert step3_config(CONFIG) == EXPECTED

    def test_with_a_vision_model(self):
        assert step3_config(TinyStep3().config(vision=True)) == EXPECTED

    def test_no_text_config_after_all(self):
        assert step3_config(CONFIG | {"text_config": None}) == EXPECTED

    @pytest.mark.parametrize(
        ("value", "layers"),
        [
            ("1,2", {1, 2}),
            (" 2, 1 ,", {1, 2}),
            ([1, 2], {1, 2}),
            (["1", "2"], {1, 2}),
            ((1, 2), {1, 2}),
            ("", set()),
            ([], set()),
            ((), set()),
            (None, {1, 2, 3}),  # Step-3's default: all but the first
        ],
    )
    def test_moe_layers(self, value, layers):
        assert step3_config(changed(moe_layers_enum=value)).moe_layers == layers

    @pytest.mark.parametrize(
        ("entries", "positions"),
        [
            ({"max_position_embedding": None}, 2048),
            ({"max_seq_len": None}, 2048),
            ({"max_position_embedding": 65536}, 65536),
            ({"max_position_embeddings": 4096, "max_position_embedding": None}, 4096),
            ({"max_seq_len": 512, "max_position_embedding": None}, 512),
        ],
    )
    def test_positions(self, entries, positions):
        assert step3_config(changed(**entries)).max_positions == positions

    @pytest.mark.parametrize(
        "entries",
        [
            {"rope_theta": 5e5},
            {"rope_theta": 500000},
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            {"rope_theta": 5e5, "rope_parameters": None},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        ],
    )
    def test_rope(self, entries):
        config = step3_config(changed(**entries))
        assert config.rope.theta == 5e5
        assert isinstance(config.rope.theta, float)

    def test_multi_token_prediction(self):
        assert step3_config(TinyStep3(mtp=True).config()).mtp_layers == 1

    def test_flags(self):
        config = step3_config(changed(norm_expert_weight=True, tie_word_embeddings=True))
        assert (config.router.renormalise, config.tied_head) == (True, True)
        config = step3_config(changed(norm_expert_weight=None, tie_word_embeddings=None))
        assert (config.router.renormalise, config.tied_head) == (False, False)

    def test_dense_models_say_nothing_of_experts(self):
        entries = dict.fromkeys(
            ("moe_num_experts", "moe_top_k", "moe_intermediate_size", "share_expert_dim")
        )
        config = step3_config(changed(moe_layers_enum=[], **entries))
        assert (config.experts, config.top_k, config.moe_layers) == (0, 0, frozenset())


class TestProblems:
    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            ({"vocab_size": "x"}, "vocab_size = 'x' is not a whole number from 1"),
            ({"vocab_size": 1.5}, "vocab_size = 1.5 is not a whole number from 1"),
            ({"vocab_size": True}, "vocab_size = True is not a whole number from 1"),
            ({"vocab_size": [160]}, "vocab_size = [160] is not a whole number from 1"),
            ({"hidden_size": 0}, "hidden_size = 0 is not a whole number from 1"),
            ({"num_hidden_layers": -1}, "num_hidden_layers = -1 is not a whole number from 1"),
            ({"num_attention_heads": None}, "num_attention_heads is missing"),
            (
                {"max_position_embedding": None, "max_seq_len": None},
                "max_position_embeddings or max_position_embedding or max_seq_len is missing",
            ),
            ({"head_dim": 31}, "head_dim = 31 is odd, and RoPE turns pairs"),
            (
                {"num_attention_groups": 3},
                "num_attention_heads = 4 is no multiple of num_attention_groups = 3",
            ),
            ({"moe_top_k": 9}, "moe_top_k = 9 of moe_num_experts = 8"),
            ({"moe_top_k": 0}, "moe_top_k = 0 of moe_num_experts = 8"),
            ({"rope_theta": "big"}, "rope_theta = 'big' is not a number above 0"),
            ({"rope_theta": None}, "rope_theta is missing"),
            ({"rms_norm_eps": 0}, "rms_norm_eps = 0 is not a number above 0"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan is not a number above 0"),
            ({"norm_expert_weight": "no"}, "norm_expert_weight = 'no' is not true or false"),
            ({"moe_layers_enum": "1,x"}, "moe_layers_enum = '1,x' is not a list of layers"),
            ({"moe_layers_enum": 3}, "moe_layers_enum = 3 is not a list of layers"),
            ({"moe_layers_enum": [[1]]}, "moe_layers_enum = [[1]] is not a list of layers"),
            ({"moe_layers_enum": [1, 4, -1]}, "moe_layers_enum names [-1, 4] of 4 layers"),
            (
                {"rope_scaling": {"rope_type": "linear", "factor": 4}},
                "rope_scaling = {'rope_type': 'linear', 'factor': 4} is not supported, only yarn",
            ),
            (
                {"rope_parameters": {"rope_type": "llama3"}},
                "rope_parameters = {'rope_type': 'llama3'} is not supported, only yarn",
            ),
            ({"rope_parameters": [3]}, "rope_parameters = [3] is not an object"),
            ({"text_config": "text"}, "text_config = 'text' is not an object"),
        ],
    )
    def test_are_named(self, entries, message):
        with pytest.raises(CheckpointError) as error:
            step3_config(changed(**entries))
        assert str(error.value) == f"config.json: {message}"

    def test_are_told_all_at_once(self):
        with pytest.raises(CheckpointError) as error:
            step3_config(changed(vocab_size="x", num_attention_heads=None, rope_theta=-1))
        assert str(error.value) == (
            "config.json: num_attention_heads is missing; vocab_size = 'x' is not a whole number "
            "from 1; rope_theta = -1 is not a number above 0"
        )


class TestNames:
    """The tiny writer has its own list of what a Step-3 checkpoint holds."""

    @pytest.mark.parametrize(
        "sizes",
        [
            TinyStep3(),
            TinyStep3(mtp=True),
            TinyStep3(moe_layers=()),
            TinyStep3(num_hidden_layers=2, moe_layers=(0, 1)),
        ],
        ids=["mixed", "mtp", "dense", "moe"],
    )
    def test_are_those_of_the_file(self, sizes):
        names = step3_names(step3_config(sizes.config()))
        assert shapes_of(names) == sizes.shapes()

    def test_copies_in_an_mtp_module_may_be_missing(self):
        sizes = TinyStep3(mtp=True, mtp_repeats_head=True)
        names = step3_names(step3_config(sizes.config()))
        assert names.optional == {
            "model.layers.4.embed_tokens.weight": (160, 64),
            "model.layers.4.shared_head.head.weight": (160, 64),
        }
        assert names.optional.items() <= sizes.shapes().items()

    def test_a_tied_head_is_the_embedding(self):
        names = step3_names(step3_config(changed(tie_word_embeddings=True)))
        assert names.head["weight"].names == ("model.embed_tokens.weight",)

    def test_no_shared_expert(self):
        names = step3_names(step3_config(changed(share_expert_dim=0)))
        assert set(names.ffn[1]) == {"experts.gate", "experts.up", "experts.down"}


RELEASED = {
    "architectures": ["Step3VLForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_step3.Step3VLConfig"},
    "bos_token_id": 0,
    "eos_token_id": 128805,
    "im_end_token": "<im_end>",
    "im_patch_token": "<im_patch>",
    "im_start_token": "<im_start>",
    "image_token_id": 128001,
    "image_token_len": 169,
    "model_type": "step3_vl",
    "patch_token_len": 81,
    "projector_bias": False,
    "text_config": {
        "architectures": ["Step3TextForCausalLM"],
        "head_dim": 256,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "max_position_embedding": 65536,
        "max_seq_len": 65536,
        "model_type": "step3_text",
        "moe_intermediate_size": 5120,
        "moe_layers_enum": ",".join(map(str, range(4, 60))),
        "moe_num_experts": 48,
        "moe_top_k": 3,
        "norm_expert_weight": False,
        "num_attention_groups": 1,
        "num_attention_heads": 64,
        "num_hidden_layers": 61,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000,
        "share_expert_dim": 5120,
        "share_q_dim": 2048,
        "torch_dtype": "bfloat16",
        "vocab_size": 128815,
    },
    "torch_dtype": "bfloat16",
    "understand_projector_stride": 2,
    "use_im_start_end": "true",
    "vision_config": {
        "hidden_act": "quick_gelu",
        "hidden_size": 1792,
        "image_size": 728,
        "num_hidden_layers": 63,
        "output_hidden_size": 4096,
        "patch_size": 14,
    },
    "vision_select_layer": -1,
}

EXPECTED_RELEASED = ModelConfig(
    vocab=128815,
    d_model=7168,
    layers=61,
    attention=MFA(q_heads=64, kv_heads=1, head_dim=256, latent=2048),
    rope=Rope(theta=500_000.0),
    d_ff=18432,
    moe_layers=frozenset(range(4, 60)),
    router=Router(experts=48, top_k=3),
    expert_d_ff=5120,
    shared_d_ff=5120,
    norm_epsilon=1e-5,
    max_positions=65536,
)


class TestReleased:
    def test_what_describes_images_is_passed_over(self):
        assert step3_config(RELEASED) == EXPECTED_RELEASED

    def test_the_text_model_alone(self):
        assert step3_config(RELEASED["text_config"]) == EXPECTED_RELEASED

    @pytest.mark.parametrize("place", ["outside", "inside"])
    def test_quantisation_is_said_outside_or_inside(self, place):
        said = {
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        }
        tree = RELEASED | said
        if place == "inside":
            tree = RELEASED | {"text_config": RELEASED["text_config"] | said}
        assert step3_config(tree).stored == "fp8_block"

    def test_the_text_models_entries_are_read_strictly(self):
        text = RELEASED["text_config"] | {"use_head_wise_attn_gate": True, "sliding_window": 512}
        with pytest.raises(CheckpointError) as error:
            step3_config(RELEASED | {"text_config": text})
        assert str(error.value) == (
            "config.json: sliding_window = 512 is not known, and might change what the model "
            "computes; use_head_wise_attn_gate = True is not known, and might change what the "
            "model computes"
        )
        ignored = ["sliding_window", "use_head_wise_attn_gate"]
        assert step3_config(RELEASED | {"text_config": text}, ignored) == EXPECTED_RELEASED

    def test_parameters(self):
        """316.3 billion in the language model, as published."""
        shapes = shapes_of(step3_names(EXPECTED_RELEASED))
        assert round(sum(math.prod(shape) for shape in shapes.values()) / 1e9, 2) == 316.29
