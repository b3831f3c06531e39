"""Compiles kernels for devices that this machine lacks, and counts the cost of their loops.

Called by `python -m pallas_kernels.estimate --count`, which needs JAX's CUDA wheels for the H200
and libtpu for TPUs. Its results are stored in `counts.json`.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import aot, bundles, gpu_resources
from pallas_kernels.attention.cases import GPU_FORMATS, KV_LENGTH, SEQUENCES
from pallas_kernels.attention.mosaic_gpu_plan import TERMS
from pallas_kernels.attention.mosaic_gpu_walk import BLOCK
from pallas_kernels.attention.shapes import SHAPES
from pallas_kernels.attention.tiles import gpu_blocks
from pallas_kernels.estimate import sass
from pallas_kernels.estimate.assumptions import LATENCIES
from pallas_kernels.estimate.sass import Cost
from pallas_kernels.grouped_matmul.cases import SHARED_ROWS
from pallas_kernels.grouped_matmul.mosaic_gpu import kind_of
from pallas_kernels.grouped_matmul.mosaic_gpu_tiles import pick_tiles
from pallas_kernels.grouped_matmul.mosaic_gpu_types import CLUSTER
from pallas_kernels.mosaic_gpu import processors
from pallas_kernels.target import Target

ATTENTION = tuple(
    f"{model} {form} decode"
    for model in ("step3", "deepseek-v3", "qwen3-235b")
    for form in ("bf16", "int8", "fp8")
)
GROUPED = (
    *(f"step3_2a2f {form} {tokens}" for form in ("bf16", "fp8") for tokens in (512, 16384)),
    *(f"step3_2a2f fp8_block_rows {tokens}" for tokens in (512, 2048, 3072, 16384)),
    *(f"step3_ep16 fp8_block_rows {tokens}" for tokens in (2048, 3072)),
    *(f"step3_half_shared fp8_block_rows {rows}" for rows in SHARED_ROWS),
)
SHARED = ("step3_half_shared",)
"""Shapes of shared experts, which all rows go to."""
TPU = (
    *(f"step3 {form}" for form in GPU_FORMATS),
    *(f"step3_2a2f {form}" for form in GPU_FORMATS),
)
PLATFORMS = ("v6e", "v7x")
H200 = Target("mosaic_gpu", "NVIDIA H200")


def loops_of(text: str, through: tuple[str, ...] = ("UTMALDG",)) -> list[Cost]:
    """Returns the cost of one turn of every innermost loop that has products. The path round a loop
    does not bypass instructions that begin with one of `through`."""
    program = sass.parse(text)
    found: list[tuple[int, int]] = []
    costs = []
    for first, last in sass.loops(program):
        body = range(first, last + 1)
        if any(first <= one and other <= last for one, other in found):
            continue
        if not any(program[at].columns for at in body):
            continue
        over = {at for at in body if program[at].columns or program[at].op.startswith(through)}
        found.append((first, last))
        costs.append(sass.cost(program, sass.way(program, first, last, over), LATENCIES))
    return costs


def compiled_loops(case: aot.Case, folder: Path) -> list[list[Cost]]:
    """Compiles a case in a prepared process, and returns the loops of each of its kernels."""
    before = set(folder.iterdir())
    gpu_resources.compile_case(case)
    texts = sorted(set(folder.glob("*.sass_ctrl")) - before, key=lambda path: path.stat().st_mtime)
    if not texts:
        raise RuntimeError(f"{case.name}: no machine code was dumped; is nvdisasm on the PATH?")
    # A grouped product adds up scaled sums behind a branch that is always taken.
    through = ("UTMALDG", "FFMA") if case.name in GROUPED else ("UTMALDG",)
    return [loops_of(path.read_text(), through) for path in texts]


def prepare(folder: Path) -> None:
    """Like `gpu_resources.prepare`, and dumps machine code too, with tools of JAX's CUDA wheels."""
    gpu_resources.prepare(str(folder))
    os.environ["MOSAIC_GPU_DUMP_SASS_CTRL"] = "1"
    library = gpu_resources.plugin()
    if library is None:
        raise RuntimeError('there is no CUDA plugin: pip install "jax[cuda13]"')
    for tools in library.parents[2].glob("nvidia/cu*/bin"):
        os.environ["PATH"] += os.pathsep + str(tools)


def count_hopper(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the counts of the cases with these names, for an H200."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for op, count in (("attention", _attention), ("grouped_matmul", _grouped)):
            for case in gpu_resources.cases(op):
                if case.name in names:
                    kernels = [
                        count(case, number, costs)
                        for number, costs in enumerate(compiled_loops(case, folder))
                        if costs
                    ]
                    yield {
                        "jax": jax.__version__,
                        "op": op,
                        "case": case.name,
                        "work": _work(op, case),
                        "kernels": kernels,
                    }


def _attention(case: aot.Case, number: int, costs: list[Cost]) -> dict[str, Any]:
    """Describes attention. A turn is a step of one lane: 64 positions, or 64 of each warpgroup."""
    model, form, _ = case.name.split()
    shape, size = SHAPES[model], jnp.dtype(GPU_FORMATS[form]).itemsize
    heads = shape.q_heads // shape.kv_heads
    steps = SEQUENCES * shape.kv_heads * KV_LENGTH // BLOCK
    rows = BLOCK * max(1, -(-heads // BLOCK))
    width = shape.head_dim + (0 if shape.shared else shape.v_width)
    # The FLOPs of a turn's wgmmas tell its rows, and so the number of turns.
    terms = TERMS if form == "fp8" and not shape.shared else 1
    of_step = 2 * rows * BLOCK * (terms * shape.head_dim + shape.v_width)
    turns = steps * of_step / sum(one.flops for one in costs) / gpu_blocks(H200)
    scales = (1 if shape.shared else 2) * 4 if size == 1 else 0
    cached = SEQUENCES * KV_LENGTH * shape.kv_heads * (width * size + scales)
    flops = 2 * SEQUENCES * shape.q_heads * KV_LENGTH * (shape.head_dim + shape.v_width)
    return _kernel(costs, turns, cached, cached, flops, 1.0, gpu_blocks(H200))


def _grouped(case: aot.Case, number: int, costs: list[Cost]) -> dict[str, Any]:
    """Describes one kernel of an expert layer. A turn is a step of a tile, for all consumers."""
    rows, gate, *_ = case.arguments
    groups, d_ff, d_model = gate.shape
    weights = 2 if number == 0 else 1
    flops = 2 * rows.shape[0] * d_ff * d_model * weights
    held = groups * d_ff * d_model * weights * jnp.dtype(gate.dtype).itemsize
    in_blocks = case.name.split()[1].endswith("_rows")
    in_bytes = 1 if in_blocks else 2
    moved = rows.shape[0] * (d_model * in_bytes + d_ff * 2)
    operands = case.arguments[1:3] if number == 0 else case.arguments[3:4]
    kind = kind_of(operands[0], in_blocks=in_blocks)
    quantises = in_blocks and number == 0
    alone = case.name.split()[0] in SHARED
    count = rows.shape[0]
    tiles = pick_tiles(count, operands, groups, H200, kind, quantises, one_group=alone)
    _, d_out, d_in = operands[0].shape
    # Only blocks that are started count. In a cluster each has its own tile, and loads half of
    # the operand that both share.
    if alone:
        row_tiles: float = -(-count // tiles.listed_rows)
    else:
        row_tiles = groups * expected_tiles(count / groups, tiles.listed_rows)
    places = row_tiles * -(-d_out // tiles.listed_out)
    blocks = CLUSTER if tiles.shared else 1
    waves = math.ceil(places * blocks / processors(H200))
    turns = waves * (d_in // tiles.inner)
    parts = {
        "rows": tiles.rows * d_in * in_bytes,
        "weights": weights * tiles.out * d_in * jnp.dtype(gate.dtype).itemsize,
    }
    if tiles.shared:
        parts[tiles.shared] /= CLUSTER
    reads = places * blocks * sum(parts.values())
    consumers, rate = costs[:1] * tiles.consumers, 2.0 if in_bytes == 1 else 1.0
    return _kernel(consumers, turns, held + moved, reads, flops, rate, processors(H200))


def expected_tiles(mean: float, tile: int) -> float:
    """Returns the expected row tiles of a group of `mean` rows, when tokens choose by chance: the
    number of rows is Poisson-distributed, and one row beyond a tile takes another tile."""
    few = int(mean - 10 * mean**0.5)
    return sum(
        math.exp(rows * math.log(mean) - mean - math.lgamma(rows + 1)) * -(-rows // tile)
        for rows in range(max(few, 1), int(mean + 10 * mean**0.5) + 10)
    )


def _work(op: str, case: aot.Case) -> int:
    """Returns the cached positions of all sequences, or the rows of an expert layer."""
    if op == "attention":
        return SEQUENCES * KV_LENGTH
    return int(case.arguments[0].shape[0])


def _kernel(
    costs: Sequence[Cost],
    turns: float,
    size: float,
    l2_bytes: float,
    flops: float,
    rate: float,
    multiprocessors: int,
) -> dict[str, Any]:
    return {
        "loops": [one._asdict() for one in costs],
        "turns": turns,
        "overhead": 0.0,
        "bytes": size,
        "l2_bytes": l2_bytes,
        "flops": flops,
        "rate": rate,
        "multiprocessors": multiprocessors,
    }


def count_tpu(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the counts of the cases with these names, for a core of each TPU generation."""
    for platform in PLATFORMS:
        for op in bundles.OPS:
            for case in aot.cases(op, platform):
                if case.loop is not None and case.name in names:
                    yield _count_tpu(op, case, case.loop, platform)


def _count_tpu(op: str, case: aot.Case, loop: aot.Loop, platform: str) -> dict[str, Any]:
    """Describes the loop of a case; for experts, only the loop of gate and up is counted."""
    about = aot.GENERATIONS[platform]
    of_experts = op == "grouped_matmul"
    return {
        "jax": jax.__version__,
        "platform": platform,
        "op": op,
        "case": case.name + ": gate and up" * of_experts,
        "units": _columns(case) if of_experts else _kv_tokens(case),
        "bundles": bundles.measure(op, case.name, loop, platform).bundles,
        "bytes": loop.bytes_per_unit,
        "copies": loop.copies / loop.units,
        "hertz": about.hertz,
        "bandwidth": about.memory_bandwidth,
    }


def _kv_tokens(case: aot.Case) -> int:
    """Returns the cached positions of the batch."""
    pages = max(jax.tree.leaves(case.arguments), key=lambda array: array.size)
    return int(pages.shape[0] * pages.shape[2])


def _columns(case: aot.Case) -> int:
    """Returns the gate columns of all experts; each counts together with its column of up."""
    groups, d_ff, _ = case.arguments[1].shape
    return int(groups * d_ff)
