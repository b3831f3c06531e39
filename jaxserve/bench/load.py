"""`python -m jaxserve.bench load`: the time to load and to convert a checkpoint, relative to `cat`.

Writes a random BF16 checkpoint with Step-3's proportions, loads it a few times in each layout and
converts it. Reports times as multiples of `cat FILES > /dev/null` and of loading: page cache warm,
best round of each.
"""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve.bench.random_model import templates_of
from jaxserve.bench.report import Measure, Part, run_parts
from jaxserve.checkpoint.conversion import convert, quieten_libraries
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.store import open_checkpoint
from jaxserve.config.load import load_deployment
from jaxserve.roles.attention import AttentionWeights
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.colocated import ColocatedWeights
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.ffn import FFNPrograms, FFNWeights

LOAD_LIMIT = 2.5
CONVERSION_LIMIT = 2.0
LAYOUTS = {"1A1F": {"mode": "afd"}, "colocated": {"mode": "colocated"}}
_SECONDS = 600.0


def config_tree(quick: bool) -> dict[str, Any]:
    """config.json of a model of 2.2 GB (quick: 20 MB) with Step-3's proportions."""
    width = 256 if quick else 2048
    return {
        "model_type": "step3_text",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_attention_heads": 32,
        "num_attention_groups": 1,
        "num_hidden_layers": 5,
        "head_dim": width // 16,
        "share_q_dim": width // 2,
        "share_expert_dim": width // 2,
        "moe_intermediate_size": width // 2,
        "moe_num_experts": 8 if quick else 36,
        "moe_top_k": 3,
        "moe_layers_enum": "1,2,3,4",
        "norm_expert_weight": False,
        "max_position_embedding": 4096,
        "vocab_size": 8 * width,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
        "torch_dtype": "bfloat16",
    }


def write_checkpoint(folder: Path, tree: Mapping[str, Any], file_bytes: int = 500 << 20) -> int:
    """Writes random weights for a config.json; returns their bytes.

    The values are slices of one block of normal numbers; drawing 2 GB would take longer than all
    the rest.
    """
    (folder / "config.json").write_text(json.dumps(tree, indent=2) + "\n")
    _, names = read_config(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for sources in (names.embedding, names.head, *names.attention, *names.ffn):
        for source in sources.values():
            shapes |= source.tensors
    rng = np.random.default_rng(0)
    noise = rng.normal(scale=0.02, size=1 << 22).astype(ml_dtypes.bfloat16)
    tensors: dict[str, np.ndarray] = {}
    size = total = files = 0
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        start = int(rng.integers(0, 1 << 16))
        tensors[name] = np.resize(noise[start:], count).reshape(shape)
        size += 2 * count
        if size >= file_bytes:
            files, total, size = files + 1, total + size, 0
            save_file(tensors, folder / f"model-{files:05d}.safetensors")
            tensors.clear()
    if tensors:
        save_file(tensors, folder / f"model-{files + 1:05d}.safetensors")
    return total + size


def measure(quick: bool) -> Part:
    """Loads the checkpoint in every layout, converts it, and loads the result."""
    rounds = 2 if quick else 5
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as name:
        folder, converted = Path(name) / "source", Path(name) / "converted"
        folder.mkdir()
        size = write_checkpoint(folder, config_tree(quick))
        ways: dict[str, Callable[[], Any]] = {
            layout: loader(folder, overrides) for layout, overrides in LAYOUTS.items()
        }
        convert(folder, converted)
        ways["convert"] = lambda: convert(folder, converted)
        ways["converted, 1A1F"] = loader(converted, LAYOUTS["1A1F"])
        seconds: dict[str, list[float]] = {way: [] for way in ("cat", "cp, sync", *ways)}
        # Not interleaved: memory that was just freed is allocated faster, on virtual machines much
        # faster.
        for way, run in ways.items():
            for _ in range(rounds):
                seconds["cat"].append(cat_seconds(folder))
                if way == "convert":
                    shutil.rmtree(converted)
                    seconds["cp, sync"].append(copy_seconds(folder))
                begin = time.perf_counter()
                run()
                seconds[way].append(time.perf_counter() - begin)
    best = {way: min(times) for way, times in seconds.items()}
    slowest = max(best[layout] for layout in LAYOUTS)
    measures = [
        *(Measure(f"{w} ÷ cat", best[w] / best["cat"], limit=LOAD_LIMIT) for w in LAYOUTS),
        Measure("convert ÷ load", best["convert"] / slowest, limit=CONVERSION_LIMIT),
        Measure("convert ÷ cp, sync", best["convert"] / best["cp, sync"]),
        *(Measure(f"  {way}", size / 1e9 / best[way], "GB/s") for way in seconds),
    ]
    notes = [f"{size / 1e9:.2f} GB, best of {rounds} rounds each, page cache warm."]
    title = "Load of a BF16 checkpoint, from opening the folder to arrays on the devices"
    return Part("load", title, measures, notes, {"bytes": size, "seconds": seconds})


def cat_seconds(folder: Path) -> float:
    """Seconds of `cat` on the weight files."""
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    begin = time.perf_counter()
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True, timeout=_SECONDS)
    return time.perf_counter() - begin


def copy_seconds(folder: Path) -> float:
    """Seconds of `cp` and `sync` on the weight files; a conversion ends on the disk, too."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as target:
        files = sorted(str(path) for path in folder.glob("*.safetensors"))
        begin = time.perf_counter()
        subprocess.run(["cp", *files, target], check=True, timeout=_SECONDS)
        subprocess.run(["sync", "-f", target], check=True, timeout=_SECONDS)
        return time.perf_counter() - begin


def loader(folder: Path, overrides: Mapping[str, Any]) -> Callable[[], None]:
    """A function that loads the folder in a layout and lets the arrays go."""
    deployment = load_deployment(folder, overrides)
    config, names = read_config(folder)
    templates, deployment, meshes = templates_of(deployment, config)
    if deployment.topology.has("colocated"):
        colocated = ColocatedPrograms(templates, deployment, meshes.attention)

        def load_colocated() -> None:
            checkpoint = open_checkpoint(folder, names)
            jax.block_until_ready(ColocatedWeights(checkpoint, names, colocated).flat)

        return load_colocated
    attention = AttentionPrograms(templates, deployment, meshes.attention)
    ffn = FFNPrograms(templates, deployment, meshes.ffn)

    def load_afd() -> None:
        checkpoint = open_checkpoint(folder, names)
        weights = AttentionWeights(checkpoint, names, attention)
        experts = FFNWeights(checkpoint, names, ffn)
        jax.block_until_ready([weights.embedding, weights.head, weights.layers, experts.layers])

    return load_afd


def run(quick: bool, json_file: Path | None) -> int:
    """Measures and prints; 1 if a target is missed."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    quieten_libraries()
    return run_parts("load", {"load": measure}, ["load"], quick, json_file)
