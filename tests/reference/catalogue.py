"""Which tiny models are compared: one entry a variation of the architecture, and random ones.

Used by `make_golden.py` and by the tests. The committed entries have golden files in `golden/`; a
random variation is compared with a live transformers only.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import (
    TinyDeepseek,
    TinyGlm4,
    TinyMinimax,
    TinyQwen3,
    TinyStep3p5,
    Yarn,
)

GOLDEN = Path(__file__).resolve().parent / "golden"

_DEEPSEEK = TinyDeepseek(yarn=Yarn(mscale=1.0, mscale_all_dim=1.0))
_KIMI = replace(
    _DEEPSEEK,
    model_type="kimi_k2",
    num_attention_heads=2,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.827,
    rope_theta=50_000.0,
    yarn=Yarn(32.0, 4096, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0),
)
_FP8 = replace(
    _DEEPSEEK,
    hidden_size=160,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=136,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=200,
    moe_intermediate_size=136,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
)
_QWEN3 = TinyQwen3()
_QWEN3_MOE = TinyQwen3(model_type="qwen3_moe")


def _entries() -> list[TinyModel]:
    def deepseek(name: str, **changes: Any) -> TinyModel:
        return TinyModel(f"deepseek_v3_{name}", replace(_DEEPSEEK, **changes))

    def moe(name: str, **changes: Any) -> TinyModel:
        return TinyModel(f"qwen3_moe_{name}", replace(_QWEN3_MOE, **changes))

    def dense(name: str, **changes: Any) -> TinyModel:
        return TinyModel(f"qwen3_{name}", replace(_QWEN3, **changes))

    return [
        TinyModel("deepseek_v3", replace(_DEEPSEEK, num_nextn_predict_layers=1)),
        TinyModel("deepseek_v3_transformers5", _DEEPSEEK, spelling="transformers 5"),
        TinyModel("deepseek_v3_fp8", _FP8, fp8_blocks=True, sigma=0.08),
        deepseek("full_query", q_lora_rank=None),
        deepseek("raw_gates", norm_topk_prob=False, routed_scaling_factor=1.5),
        deepseek("one_group", n_group=1, topk_group=1),
        deepseek("all_dense", first_k_dense_replace=3),
        deepseek("all_moe", first_k_dense_replace=0, n_shared_experts=2),
        deepseek("two_dense", first_k_dense_replace=2),
        deepseek("every_other", num_hidden_layers=4, moe_layer_freq=2),
        deepseek("no_yarn", yarn=None),
        deepseek("yarn_mscales", yarn=Yarn(40.0, 4096, mscale=0.7, mscale_all_dim=1.2)),
        deepseek("yarn_plain", yarn=Yarn(beta_fast=None, beta_slow=None)),
        deepseek("biases", attention_bias=True),
        deepseek("full_query_biases", q_lora_rank=None, attention_bias=True),
        deepseek("epsilon", rms_norm_eps=1e-2),
        deepseek("tied", tie_word_embeddings=True),
        TinyModel("kimi_k2", _KIMI),
        TinyModel("kimi_k2_thinking", replace(_KIMI, rms_norm_eps=1e-5), spelling="transformers 5"),
        TinyModel("qwen3_moe", _QWEN3_MOE),
        TinyModel("qwen3_moe_transformers5", _QWEN3_MOE, spelling="transformers 5"),
        moe("raw_gates", norm_topk_prob=False),
        moe("sparse_step", num_hidden_layers=4, decoder_sparse_step=2),
        moe("mlp_only", mlp_only_layers=(1,)),
        moe("biases", attention_bias=True),
        moe("window", use_sliding_window=True, sliding_window=8, max_window_layers=2),
        moe("four_queries_a_key", num_key_value_heads=1),
        moe("tied", num_key_value_heads=4, tie_word_embeddings=True),
        TinyModel("qwen3", _QWEN3),
        TinyModel("qwen3_transformers5", _QWEN3, spelling="transformers 5"),
        dense("four_queries_a_key", num_key_value_heads=1),
        dense("tied", num_key_value_heads=4, tie_word_embeddings=True),
        dense("biases", attention_bias=True, rms_norm_eps=1e-5),
        dense(
            "window",
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=2,
        ),
        TinyModel(
            "qwen3_window_transformers5",
            replace(_QWEN3, use_sliding_window=True, sliding_window=5, max_window_layers=1),
            spelling="transformers 5",
        ),
        dense("window_unused", use_sliding_window=False, sliding_window=4, max_window_layers=0),
        dense("yarn", yarn=Yarn()),
        TinyModel("glm4_moe", TinyGlm4(num_nextn_predict_layers=1)),
        TinyModel(
            "glm4_moe_air",
            TinyGlm4(use_qk_norm=False, routed_scaling_factor=1.0, yarn=Yarn()),
            spelling="transformers 5",
        ),
        TinyModel("minimax_m2", TinyMinimax()),
        TinyModel("minimax_m2_transformers5", TinyMinimax(), spelling="transformers 5"),
        TinyModel("step3p5", TinyStep3p5(), sigma=0.3),
    ]


_index = GOLDEN / "golden.json"
_made = json.loads(_index.read_text())["models"] if _index.exists() else {}
CATALOGUE: dict[str, TinyModel] = {
    entry.name: replace(entry, seed=_made.get(entry.name, {}).get("seed", 0))
    for entry in _entries()
}
"""By name, with the seeds that `make_golden.py` found."""


def random_model(seed: int) -> TinyModel:
    """A random variation; the same one for the same seed."""
    draw = random.Random(seed)
    make = draw.choice((_random_deepseek, _random_deepseek, _random_qwen3_moe, _random_qwen3))
    sizes = make(draw)
    old = isinstance(sizes, TinyDeepseek) and sizes.moe_layer_freq > 1
    spelling = "released" if old else draw.choice(("released", "transformers 5"))
    return TinyModel(f"random_{seed}", sizes, seed, spelling)


def _random_yarn(draw: random.Random) -> Yarn | None:
    mscales = draw.choice(((None, None), (1.0, 1.0), (0.707, 0.707), (1.0, 0.5), (0.8, 1.3)))
    yarn = Yarn(
        draw.choice((4.0, 32.0, 40.0)),
        draw.choice((32, 64, 4096)),
        draw.choice((None, 32.0, 8.0, 1.0)),
        draw.choice((None, 1.0)),
        *mscales,
    )
    return draw.choice((None, yarn, yarn))


def _random_deepseek(draw: random.Random) -> TinyDeepseek:
    groups = draw.choice((1, 2, 4))
    group = draw.choice((2, 3, 4))
    kept = draw.randint(1, groups)
    layers = draw.choice((2, 3, 4))
    return TinyDeepseek(
        model_type=draw.choice(("deepseek_v3", "kimi_k2")),
        hidden_size=draw.choice((32, 48, 64)),
        num_hidden_layers=layers,
        num_attention_heads=draw.choice((1, 2, 4, 6)),
        q_lora_rank=draw.choice((None, 20, 24)),
        kv_lora_rank=draw.choice((16, 32, 40)),
        qk_nope_head_dim=draw.choice((8, 12, 16)),
        qk_rope_head_dim=draw.choice((4, 6, 8, 16)),
        v_head_dim=draw.choice((10, 14, 24)),
        attention_bias=draw.random() < 0.3,
        n_routed_experts=groups * group,
        n_shared_experts=draw.choice((1, 2)),
        num_experts_per_tok=draw.randint(1, kept * group),
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=draw.random() < 0.7,
        routed_scaling_factor=draw.choice((1.0, 2.5, 2.827)),
        first_k_dense_replace=draw.choice((0, 0, 1, 1, layers - 1, layers)),
        moe_layer_freq=draw.choice((1, 1, 1, 2)),
        rope_theta=draw.choice((10_000.0, 50_000.0)),
        yarn=_random_yarn(draw),
        rms_norm_eps=draw.choice((1e-6, 1e-5, 1e-2)),
        tie_word_embeddings=draw.random() < 0.2,
    )


def _random_qwen3(draw: random.Random, **fixed: Any) -> TinyQwen3:
    heads = draw.choice((2, 4, 6))
    layers = draw.choice((2, 3, 4))
    windowed = draw.random() < 0.4
    return TinyQwen3(
        hidden_size=draw.choice((32, 48, 64)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([n for n in (1, 2, 3, 4, 6) if heads % n == 0]),
        head_dim=draw.choice((8, 16, 20)),
        attention_bias=draw.random() < 0.3,
        use_sliding_window=windowed,
        sliding_window=draw.choice((1, 3, 8, 16)) if windowed else None,
        max_window_layers=draw.randint(0, layers),
        rope_theta=draw.choice((10_000.0, 1e6)),
        yarn=draw.choice((None, None, Yarn(4.0, 64), Yarn(2.0, 4096))),
        rms_norm_eps=draw.choice((1e-6, 1e-5)),
        tie_word_embeddings=draw.random() < 0.3,
        **fixed,
    )


def _random_qwen3_moe(draw: random.Random) -> TinyQwen3:
    experts = draw.choice((4, 6, 8))
    only_dense = tuple(layer for layer in range(4) if draw.random() < 0.2)
    return _random_qwen3(
        draw,
        model_type="qwen3_moe",
        num_experts=experts,
        num_experts_per_tok=draw.randint(1, experts),
        norm_topk_prob=draw.random() < 0.6,
        decoder_sparse_step=draw.choice((1, 1, 2)),
        mlp_only_layers=only_dense,
    )
