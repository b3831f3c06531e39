"""Writes a Step-3 checkpoint in which quantisation hurts.

Trained on little text, the demo model has no channels that stand out; in models of real size
activations are 10 to 100 times wider than weights in a few channels (xDeepServe §4.7, figure 15).
Here a few channels behind every norm, of every value head and of every FFN's hidden rows become 32
to 100 times as wide as the median channel where they are written, and are made up for where they
are read. The factors are powers of two: the model is the same function, bit for bit in FP32 and
in BF16, and only its quantisation is worse. Called by `bench quality`; shares no code with the
calibration that is judged by it.
"""

import shutil
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

WIDTHS = (32.0, 64.0, 100.0)
"""Widths of the chosen channels, as multiples of the median channel's."""
SHARE = 0.02
"""Share of the channels that are made wider; at least two."""
SEED = 7

Tensors = MutableMapping[str, np.ndarray]


def write_outliers(source: Path, target: Path) -> int:
    """Writes a Step-3 checkpoint in one file; returns the number of widened channels."""
    path = source / "model.safetensors"
    tensors = load_file(path)
    layers = sorted(
        name.removesuffix("self_attn.wq.weight")
        for name in tensors
        if name.endswith("self_attn.wq.weight")
    )
    wider = sum(_widen_layer(tensors, layer) for layer in layers)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, target / path.name, metadata={"format": "pt"})
    return wider


def _widen_layer(tensors: Tensors, layer: str) -> int:
    attention = f"{layer}self_attn."
    down = [f"{attention}{name}_proj.weight" for name in "qkv"]
    ffns = [
        prefix
        for prefix in (f"{layer}mlp.", f"{layer}moe.", f"{layer}share_expert.")
        if f"{prefix}gate_proj.weight" in tensors
    ]
    reading = [f"{prefix}{part}_proj.weight" for prefix in ffns for part in ("gate", "up")]
    router = [name for name in (f"{layer}moe.gate.weight",) if name in tensors]
    count = _widen(tensors, [f"{layer}input_layernorm.weight"], down)
    count += _widen(tensors, [f"{attention}inter_norm.weight"], [f"{attention}wq.weight"])
    count += _widen(tensors, [f"{layer}post_attention_layernorm.weight"], reading + router)
    # Every query head reads the one value head.
    count += _widen(tensors, [f"{attention}v_proj.weight"], [f"{attention}o_proj.weight"])
    for prefix in ffns:
        count += _widen(tensors, [f"{prefix}up_proj.weight"], [f"{prefix}down_proj.weight"])
    return count


def _widen(tensors: Tensors, written: Sequence[str], read: Sequence[str]) -> int:
    """Multiplies a few channels where they are written, and divides them where they are read."""
    first = tensors[written[0]]
    axis = max(first.ndim - 2, 0)
    channels = first.shape[axis]
    chosen = np.random.default_rng(SEED + channels).permutation(channels)
    chosen = chosen[: max(2, round(SHARE * channels))]
    rows = np.moveaxis(first.astype(np.float32), axis, 0).reshape(channels, -1)
    width = np.sqrt(np.mean(rows**2, axis=1))
    factors = np.ones(channels, np.float32)
    wanted = np.resize(WIDTHS, len(chosen)) * np.median(width) / width[chosen]
    factors[chosen] = np.exp2(np.floor(np.log2(wanted)))
    for name in written:
        shaped = factors if first.ndim == 1 else factors[:, None]
        tensors[name] = _times(tensors[name], shaped)
    for name in read:
        repeats = tensors[name].shape[-1] // channels
        tensors[name] = _times(tensors[name], 1 / np.tile(factors, repeats))
    return len(chosen)


def _times(tensor: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return (tensor.astype(np.float32) * factors).astype(tensor.dtype)
