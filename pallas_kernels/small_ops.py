"""Does XLA fuse the small ops around the kernels? Compares the bytes that compiled programs move
with the least possible.

`python -m pallas_kernels.small_ops [--generation v6e]` compiles, without a TPU, the ops between
attention and experts at Step-3's and DeepSeek-V3's sizes. It reads from the program the bytes that
instructions move from and to HBM; traffic within VMEM is nearly free. An op near the minimum needs
no kernel, unless it runs row by row, as scatters do, which bytes do not show. `--generation h200`
does the same for a GPU (it needs JAX's CUDA wheels). There the number of instructions counts, each
of which launches a kernel.

The ops between attention and the wire are compiled twice: as XLA fuses them, and with
`rms_norm_quantize`, which on TPUs is the same.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import aot, gpu_resources
from pallas_kernels.grouped_matmul.routed import combine, sort_choices
from pallas_kernels.hlo import INSTRUCTION, hbm_bytes, parts_read
from pallas_kernels.norm_quantize import reference, rms_norm, rms_norm_quantize
from pallas_kernels.quantize import Format, quantize_rows

TOKENS, D_MODEL, EXPERTS, TOP_K = 128, 7168, 256, 8
GROUPS, TOP_GROUPS = 8, 4
STEP3_EXPERTS, STEP3_TOP_K = 48, 3
ROWS = TOKENS * TOP_K
EPSILON = 1e-5

GPU = "h200"
GENERATIONS = (*aot.GENERATIONS, GPU)


class SmallOp(NamedTuple):
    """An op, its arguments (`jax.ShapeDtypeStruct`), and the bytes it has to read and write."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    least: int


class Traffic(NamedTuple):
    """Instructions and bytes of a compiled program, or of a part."""

    instructions: int
    """Number of instructions that compute or copy something."""
    bytes: int
    """Bytes read from HBM and written to it."""


def norm_and_quantize(x: Array, weight: Array) -> Any:
    """Norms rows by RMSNorm, and quantises them to INT8 with scales."""
    return quantize_rows(rms_norm(x, weight, EPSILON), "int8")


def attention_to_wire(
    x: Array,
    mixed: Array,
    weight: Array,
    gate: Array,
    *,
    format: Format,
    norm_and_quantize: Callable[..., Any],
) -> Any:
    """Computes the end of a layer's attention: residual, norm, router, and a message in bytes.

    Args:
      norm_and_quantize: the op, which may have a kernel, or its reference.
    """
    x = x + mixed
    normed, values, scales = norm_and_quantize(x, weight, EPSILON, format)
    experts, gates = route_step3(normed, gate)
    parts = (values, scales[:, None], experts, gates)
    message = [
        jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(x.shape[0], -1) for part in parts
    ]
    return x, jnp.concatenate(message, axis=1)


def route(x: Array, weight: Array, bias: Array) -> Any:
    """Routes like DeepSeek-V3: the best experts of the best groups, by scores with a bias."""
    scores = jax.nn.sigmoid(jnp.einsum("td,ed->te", x, weight, preferred_element_type=jnp.float32))
    grouped = (scores + bias).reshape(x.shape[0], GROUPS, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, best = jax.lax.top_k(jnp.sum(best_two, axis=-1), TOP_GROUPS)
    kept = jnp.any(best[:, :, None] == jnp.arange(GROUPS), axis=1)
    choice = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    _, experts = jax.lax.top_k(choice, TOP_K)
    gates = jnp.take_along_axis(scores, experts, axis=-1)
    return experts, gates / jnp.sum(gates, axis=-1, keepdims=True)


def route_step3(x: Array, weight: Array) -> Any:
    """Routes like Step-3: the best of all experts."""
    scores = jax.nn.sigmoid(jnp.einsum("td,ed->te", x, weight, preferred_element_type=jnp.float32))
    gates, experts = jax.lax.top_k(scores, STEP3_TOP_K)
    return experts, gates / jnp.sum(gates, axis=-1, keepdims=True)


def permute(x: Array, experts: Array) -> Any:
    """Returns rows sorted by expert, and their order."""
    order = sort_choices(experts, EXPERTS)
    return x[order.source], order


def small_ops(format: Format = "int8") -> list[SmallOp]:
    """Returns the small ops of a decode step of `TOKENS` tokens, with messages in this format."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    x = array(TOKENS, D_MODEL)
    fp32, int32 = jnp.float32, jnp.int32
    to_wire = functools.partial(attention_to_wire, format=format)
    attended = (x, x, array(D_MODEL), array(STEP3_EXPERTS, D_MODEL))
    experts = array(TOKENS, TOP_K, dtype=int32)
    order = jax.eval_shape(functools.partial(sort_choices, groups=EXPERTS), experts)
    found: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("norm and quantise", norm_and_quantize, (x, array(D_MODEL))),
        (
            "attention to wire",
            functools.partial(to_wire, norm_and_quantize=reference.rms_norm_quantize),
            attended,
        ),
        (
            "to wire, with op",
            functools.partial(to_wire, norm_and_quantize=rms_norm_quantize),
            attended,
        ),
        ("route deepseek-v3", route, (x, array(EXPERTS, D_MODEL), array(EXPERTS, dtype=fp32))),
        ("route step3", route_step3, (x, array(STEP3_EXPERTS, D_MODEL))),
        ("permute", permute, (x, experts)),
        (
            "unpermute",
            combine,
            (array(ROWS, D_MODEL), array(TOKENS, TOP_K, dtype=fp32), order),
        ),
    ]
    return [
        SmallOp(name, function, arguments, _size((arguments, jax.eval_shape(function, *arguments))))
        for name, function, arguments in found
    ]


def _size(tree: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))


COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
_CALLED = re.compile(r"calls=%([\w.-]+)")
_RESERVES = 'custom_call_target="AllocateBuffer"'
_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape")


class Instruction(NamedTuple):
    """Instruction of the entry computation of a compiled program."""

    name: str
    op: str
    operands: list[str]
    """Names of the operands."""
    line: str
    moved: Traffic
    """Traffic of this instruction alone; zero if it only ends what another one started."""


def instructions(program: str, in_place: Collection[int] = ()) -> Iterator[Instruction]:
    """Yields the instructions that compute, copy, start or end something, in the schedule's order.

    Arrays whose layout names a memory space, S(1), lie on the core. Asynchronous work counts at its
    start. An array that an instruction takes twice, also as other bits, is read once. If a fusion
    cuts slices out of an operand, only the slices count (`hlo.parts_read`). Instructions that only
    reserve memory are left out.

    Args:
      program: text of the program.
      in_place: see `traffic`.
    """

    def is_pool(shape: tuple[int, ...]) -> bool:
        return bool(shape) and shape[0] in in_place

    before, _, entry = program.partition("\nENTRY ")
    cut = parts_read(before)
    types: dict[str, str] = {}
    sources: dict[str, str] = {}
    for line in entry.splitlines():
        if (match := INSTRUCTION.match(line)) is None:
            continue
        name, op = match["name"], match["op"]
        types[name] = match["type"]
        operands = re.findall(r"%([\w.-]+)", match["operands"])
        if op in ("bitcast", "reshape"):
            sources[name] = sources.get(operands[0], operands[0])
        if op in _NOTHING or _RESERVES in line:
            continue
        moves = not op.endswith("-done")
        size = hbm_bytes(match["type"], is_pool) if moves else 0
        if not op.endswith(("-start", "-done")):  # of what starts, the type has operands in it
            once = {sources.get(operand, operand): operand for operand in operands}
            called = _CALLED.search(line)
            parts_of = cut.get(called[1], {}) if called else {}
            shares: dict[str, float] = {}
            for number, operand in enumerate(operands):
                source = sources.get(operand, operand)
                shares[source] = shares.get(source, 0) + parts_of.get(number, 1)
            size += round(
                sum(
                    min(share, 1) * hbm_bytes(types.get(once[source], ""), is_pool)
                    for source, share in shares.items()
                )
            )
        yield Instruction(name, op, operands, line, Traffic(moves, size))


def traffic(program: str, in_place: Collection[int] = ()) -> Traffic:
    """Returns the traffic of a compiled program's entry computation; see `instructions`.

    Args:
      program: text of the program.
      in_place: lengths of the first axis of arrays that are left out, since instructions touch few
        of their rows: a pool of pages, a table of embeddings.
    """
    parts = (one.moved for one in instructions(program, in_place))
    return Traffic(*(sum(numbers) for numbers in zip(Traffic(0, 0), *parts, strict=True)))


def measure(generation: str) -> Iterator[tuple[SmallOp, Traffic]]:
    """Compiles all small ops and yields their traffic; `main` prepares the process for that."""
    for op in small_ops("fp8" if generation in (GPU, "v7x") else "int8"):
        case = aot.Case(op.name, op.function, op.arguments)
        if generation == GPU:
            compiled = gpu_resources.compile_case(case)
        else:
            compiled = aot.compile_case(case, aot.GENERATIONS[generation])
        yield op, traffic(compiled.as_text() or "")


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.small_ops")
    parser.add_argument("--generation", choices=GENERATIONS, default="v6e")
    generation = parser.parse_args().generation
    if generation != GPU:
        os.environ.update(aot.environment())
    elif gpu_resources.plugin() is None:
        sys.exit('there is no CUDA plugin: pip install "jax[cuda13]"')
    else:
        gpu_resources.prepare()
    print(f"{'op':<18} {'for':<4} {'instructions':>12} {'bytes':>10} {'least':>10} {'ratio':>6}")
    for op, found in measure(generation):
        print(
            f"{op.name:<18} {generation:<4} {found.instructions:12} {found.bytes:10} "
            f"{op.least:10} {found.bytes / op.least:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
