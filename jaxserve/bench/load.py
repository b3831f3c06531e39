"""`python -m jaxserve.bench load`: the time to load and to convert a checkpoint, relative to `cat`.

Writes a random BF16 checkpoint with Step-3's proportions, loads it a few times in each layout and
converts it. Reports times as multiples of `cat FILES > /dev/null` and of loading: page cache warm,
best round of each.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve.bench.random_model import templates_of
from jaxserve.bench.report import Measure, Part, wall_seconds
from jaxserve.bench.workers import Task, run_worker
from jaxserve.checkpoint.conversion import convert, quieten_libraries
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.config.load import load_deployment
from jaxserve.roles.attention_programs import AttentionWeights, LayerPrograms
from jaxserve.roles.colocated import ColocatedPrograms, ColocatedWeights
from jaxserve.roles.ffn import FFNPrograms, FFNWeights

LOAD_LIMIT = 2.5
CONVERSION_LIMIT = 2.0
LAYOUTS = ("1A1F", "colocated")
SCALED = (
    *("hidden_size", "intermediate_size", "head_dim", "share_q_dim", "share_expert_dim"),
    *("moe_intermediate_size", "vocab_size"),
)
"""Sizes of the model that are an eighth in a smoke test."""
BF16 = ml_dtypes.bfloat16
_SECONDS = 600.0


def config_tree(quick: bool) -> dict[str, Any]:
    """Returns the config.json of a model of 2.2 GB (quick: 20 MB) with Step-3's proportions."""
    tree = json.loads(Path(__file__).with_name("load_model.json").read_text())
    sizes = {key: tree[key] // 8 for key in SCALED if quick}
    return tree | sizes | ({"moe_num_experts": 8} if quick else {})


def write_checkpoint(
    folder: Path, tree: Mapping[str, Any], file_bytes: int = 500 << 20, dtype: Any = BF16
) -> int:
    """Writes random weights of one dtype for a config.json; returns their bytes.

    Matrices have the scale of their rows and norms are 1, so that activations stay of one size. The
    values are slices of one block of normal numbers; drawing 2 GB would take longer than all the
    rest.
    """
    (folder / "config.json").write_text(json.dumps(tree, indent=2) + "\n")
    _, names = read_config(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for sources in (names.embedding, names.head, *names.attention, *names.ffn):
        for source in sources.values():
            shapes |= source.tensors
    rng = np.random.default_rng(0)
    noise = rng.normal(size=1 << 22).astype(np.float32)
    tensors: dict[str, np.ndarray] = {}
    total = size = files = 0
    for name, shape in shapes.items():
        made = np.ones(shape, dtype)
        if len(shape) > 1:
            start = int(rng.integers(0, 1 << 16))
            values = np.resize(noise[start:], made.size).reshape(shape)
            made = (values * shape[-1] ** -0.5).astype(dtype)
        if size + made.nbytes > file_bytes:
            files, size = files + 1, 0
            save_file(tensors, folder / f"model-{files:05d}.safetensors")
            tensors.clear()
        tensors[name] = made
        size += made.nbytes
        total += made.nbytes
    last = f"model-{files + 1:05d}.safetensors" if files else "model.safetensors"
    save_file(tensors, folder / last, metadata={"format": "pt"})
    return total


def measure(quick: bool) -> Iterator[Part]:
    """Measures in a process with two devices."""
    seconds, size = run_worker(Task(measure_ways, {"quick": quick}, devices=2), _SECONDS)
    yield part_of(seconds, size)


def measure_ways(quick: bool) -> tuple[dict[str, list[float]], int]:
    """Loads a checkpoint in every layout, converts it, and loads the result. Returns the seconds of
    every way and the bytes of the checkpoint."""
    quieten_libraries()
    rounds = 2 if quick else 5
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as name:
        folder, converted = Path(name) / "source", Path(name) / "converted"
        folder.mkdir()
        size = write_checkpoint(folder, config_tree(quick))
        convert(folder, converted)
        ways: dict[str, Callable[[], Any]] = {
            "1A1F": lambda: load_as("afd", folder),
            "colocated": lambda: load_as("colocated", folder),
            "convert": lambda: convert(folder, converted),
            "converted, 1A1F": lambda: load_as("afd", converted),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ("cat", *ways)}
        # Not interleaved: memory that was just freed is allocated faster, on virtual machines much
        # faster.
        for way, run in ways.items():
            for _ in range(rounds):
                seconds["cat"].append(cat_seconds(folder))
                if way == "convert":
                    shutil.rmtree(converted)
                seconds[way].append(wall_seconds(run))
    return seconds, size


def part_of(seconds: Mapping[str, Sequence[float]], size: int) -> Part:
    """Builds the report of the seconds of all ways to handle a checkpoint of `size` bytes."""
    best = {way: min(times) for way, times in seconds.items()}
    slowest = max(best[layout] for layout in LAYOUTS)
    measures = [
        *(Measure(f"{w} ÷ cat", best[w] / best["cat"], limit=LOAD_LIMIT) for w in LAYOUTS),
        Measure("convert ÷ load", best["convert"] / slowest, limit=CONVERSION_LIMIT),
        *(Measure(f"  {way}", size / 1e9 / best[way], "GB/s") for way in seconds),
    ]
    notes = [f"{size / 1e9:.2f} GB, best of {len(seconds['convert'])} rounds, page cache warm."]
    title = "Load of a BF16 checkpoint, from opening the folder to arrays on the devices"
    return Part("load", title, measures, notes, {"bytes": size, "seconds": seconds})


def cat_seconds(folder: Path) -> float:
    """Seconds of `cat` on the weight files."""
    command = ["cat", *map(str, sorted(folder.glob("*.safetensors")))]
    return wall_seconds(
        lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=_SECONDS)
    )


def load_as(mode: str, folder: Path) -> None:
    """Loads the folder as the workers of this mode do, and lets the arrays go."""
    deployment = load_deployment(folder, {"mode": mode})
    config, names = read_config(folder)
    templates, meshes = templates_of(deployment, config)
    source = open_checkpoint(folder, names)
    if deployment.topology.has("colocated"):
        programs = ColocatedPrograms(templates, deployment, meshes.attention)
        jax.block_until_ready(ColocatedWeights(source, names, programs).flat)
        return
    attention = LayerPrograms(templates, deployment, meshes.attention)
    ffn = FFNPrograms(templates, deployment, meshes.ffn)
    held = AttentionWeights(source, names, attention), FFNWeights(source, names, ffn)
    jax.block_until_ready([(held[0].embedding, held[0].head), *(one.blocks for one in held)])
