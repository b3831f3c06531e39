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

TABLES = Path(__file__).resolve().parents[1] / "golden" / "reference"
TABLE = TABLES / "catalogue.yaml"
RANDOM = yaml.safe_load((TABLES / "random_models.yaml").read_text())


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
"""Models by name, with the seeds that `make_golden.py` found."""


def random_model(seed: int) -> TinyModel:
    """A random variation; the same one for the same seed."""
    draw = random.Random(seed)
    make = draw.choice((_random_deepseek, _random_deepseek, _random_qwen3_moe, _random_qwen3))
    sizes = make(draw)
    old = isinstance(sizes, TinyDeepseek) and sizes.moe_layer_freq > 1
    spelling = "released" if old else draw.choice(("released", "transformers 5"))
    return TinyModel(f"random_{seed}", sizes, seed, spelling)


def _drawn(draw: random.Random, section: str) -> dict[str, Any]:
    """The sizes of a section of `RANDOM`."""
    return {
        name: draw.random() < values if isinstance(values, float) else draw.choice(values)
        for name, values in RANDOM[section].items()
    }


def _random_yarn(draw: random.Random) -> Yarn | None:
    entries = _drawn(draw, "yarn")
    mscales = dict(zip(("mscale", "mscale_all_dim"), entries.pop("mscales"), strict=True))
    yarn = Yarn(**entries, **mscales)
    return draw.choice((None, yarn, yarn))


def _random_deepseek(draw: random.Random) -> TinyDeepseek:
    groups, group = draw.choice((1, 2, 4)), draw.choice((2, 3, 4))
    kept, layers = draw.randint(1, groups), draw.choice((2, 3, 4))
    return TinyDeepseek(
        num_hidden_layers=layers,
        n_routed_experts=groups * group,
        n_group=groups,
        topk_group=kept,
        **_drawn(draw, "deepseek"),
        num_experts_per_tok=draw.randint(1, kept * group),
        **_drawn(draw, "deepseek, gates"),
        first_k_dense_replace=draw.choice((0, 0, 1, 1, layers - 1, layers)),
        **_drawn(draw, "deepseek, layers"),
        yarn=_random_yarn(draw),
        **_drawn(draw, "deepseek, outside"),
    )


def _random_qwen3(draw: random.Random, **fixed: Any) -> TinyQwen3:
    heads, layers, windowed = draw.choice((2, 4, 6)), draw.choice((2, 3, 4)), draw.random() < 0.4
    return TinyQwen3(
        hidden_size=draw.choice((32, 48, 64)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([n for n in (1, 2, 3, 4, 6) if heads % n == 0]),
        **_drawn(draw, "qwen3"),
        use_sliding_window=windowed,
        sliding_window=draw.choice((1, 3, 8, 16)) if windowed else None,
        max_window_layers=draw.randint(0, layers),
        rope_theta=draw.choice((10_000.0, 1e6)),
        yarn=draw.choice((None, None, Yarn(4.0, 64), Yarn(2.0, 4096))),
        **_drawn(draw, "qwen3, outside"),
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
