"""Which tiny models are compared: one entry a variation of the architecture, and random ones.

Used by `make_golden.py` and by the tests. The committed entries have golden files in `golden/`; a
random variation is compared with a live transformers only.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.reference import tiny_sizes
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import TinyDeepseek, TinyQwen3, Yarn

GOLDEN = Path(__file__).resolve().parent / "golden"

TABLE = Path(__file__).resolve().parents[1] / "golden" / "reference" / "catalogue.yaml"


def _entries() -> Iterator[TinyModel]:
    """The models that `TABLE` lists."""
    for name, row in yaml.safe_load(TABLE.read_text()).items():
        made, sizes = getattr(tiny_sizes, row.pop("of")), row.pop("sizes")
        sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()}
        if "yarn" in sizes:
            sizes["yarn"] = sizes["yarn"] if sizes["yarn"] is None else Yarn(**sizes["yarn"])
        yield TinyModel(name, made(**sizes), **row)


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
