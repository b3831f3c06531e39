"""Does XLA fuse the small ops around the kernels? What a compiled program moves, against the least.

`python -m pallas_kernels.small_ops [--generation v6e]` compiles, without a TPU, what stands between
attention and experts at Step-3's and DeepSeek-V3's sizes, and reads from the program what its
instructions read from HBM and write to it; what they keep in VMEM costs next to nothing. An op that
is near the least needs no kernel. Knows nothing of the ops that have kernels.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import aot
from pallas_kernels.quantize import quantize_rows

TOKENS, D_MODEL, EXPERTS, TOP_K = 128, 7168, 256, 8
GROUPS, TOP_GROUPS = 8, 4
STEP3_EXPERTS, STEP3_TOP_K = 48, 3
ROWS = TOKENS * TOP_K


class SmallOp(NamedTuple):
    """An op, its arguments (`jax.ShapeDtypeStruct`), and the bytes it has to read and write."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    least: int


class Traffic(NamedTuple):
    """Of a compiled program."""

    instructions: int
    """That compute or copy something."""
    bytes: int
    """From HBM and to it."""


def norm_and_quantize(x: Array, weight: Array) -> Any:
    """RMSNorm, and its rows in INT8 with their scales."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return quantize_rows((wide * weight.astype(jnp.float32)).astype(x.dtype), "int8")


def route(x: Array, weight: Array, bias: Array) -> Any:
    """DeepSeek-V3's choice: the best experts of the best groups, by scores with a bias."""
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
    """Step-3's: the best experts of all."""
    scores = jax.nn.sigmoid(jnp.einsum("td,ed->te", x, weight, preferred_element_type=jnp.float32))
    gates, experts = jax.lax.top_k(scores, STEP3_TOP_K)
    return experts, gates / jnp.sum(gates, axis=-1, keepdims=True)


def permute(x: Array, experts: Array) -> Any:
    """Rows sorted by expert, their order, and how many each expert has."""
    group = experts.reshape(-1)
    order = jnp.argsort(group, stable=True)
    return x[order // TOP_K], order, jnp.bincount(group, length=EXPERTS)


def unpermute(rows: Array, gates: Array, order: Array) -> Array:
    """The experts' outputs times the gates, added up a token."""
    weighted = rows.astype(jnp.float32) * gates.reshape(-1)[order][:, None]
    return jnp.zeros((TOKENS, D_MODEL), jnp.float32).at[order // TOP_K].add(weighted)


def small_ops() -> list[SmallOp]:
    """Of one decode step of `TOKENS` tokens."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    x = array(TOKENS, D_MODEL)
    fp32, int32 = jnp.float32, jnp.int32
    found: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("norm and quantise", norm_and_quantize, (x, array(D_MODEL))),
        ("route deepseek-v3", route, (x, array(EXPERTS, D_MODEL), array(EXPERTS, dtype=fp32))),
        ("route step3", route_step3, (x, array(STEP3_EXPERTS, D_MODEL))),
        ("permute", permute, (x, array(TOKENS, TOP_K, dtype=int32))),
        (
            "unpermute",
            unpermute,
            (array(ROWS, D_MODEL), array(TOKENS, TOP_K, dtype=fp32), array(ROWS, dtype=int32)),
        ),
    ]
    return [
        SmallOp(name, function, arguments, _size((arguments, jax.eval_shape(function, *arguments))))
        for name, function, arguments in found
    ]


def _size(tree: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))


_INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?%(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w-]+)\((?P<operands>.*?)\)"
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\]\{(?P<layout>[^}]*)\}")
_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape")


def traffic(program: str) -> Traffic:
    """What the entry computation of a compiled TPU program (its text) moves.

    Arrays whose layout names a memory space, S(1), lie on the core. A copy that is started counts
    where it is started.
    """
    entry = program[program.index("\nENTRY ") :]
    types: dict[str, str] = {}
    instructions = total = 0
    for match in filter(None, map(_INSTRUCTION.match, entry.splitlines())):
        op, types[match["name"]] = match["op"], match["type"]
        if op in _NOTHING or op.endswith("-done"):
            continue
        instructions += 1
        total += _outside(match["type"])
        if op != "copy-start":  # whose type has its operand in it
            operands = re.findall(r"%([\w.-]+)", match["operands"])
            total += sum(_outside(types.get(operand, "")) for operand in operands)
    return Traffic(instructions, total)


def _outside(type_text: str) -> int:
    """Bytes of the arrays of a type that lie in HBM."""
    total = 0
    for array in _ARRAY.finditer(type_text):
        if "S(" in array["layout"]:
            continue
        bits = 8 if array["dtype"] == "pred" else int(re.findall(r"\d+", array["dtype"])[0])
        sizes = [int(size) for size in array["shape"].split(",") if size]
        total += math.prod(sizes) * bits // 8
    return total


def measure(generation: str) -> Iterator[tuple[SmallOp, Traffic]]:
    """Compile all of them; the process must have been started in `aot.environment()`."""
    for op in small_ops():
        case = aot.Case(op.name, op.function, op.arguments)
        yield op, traffic(aot.compile_case(case, aot.GENERATIONS[generation]).as_text() or "")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.small_ops")
    parser.add_argument("--generation", choices=aot.GENERATIONS, default="v6e")
    arguments = parser.parse_args()
    os.environ.update(aot.environment())
    print(f"{'op':<18} {'TPU':<4} {'instructions':>12} {'bytes':>10} {'least':>10} {'ratio':>6}")
    for op, found in measure(arguments.generation):
        print(
            f"{op.name:<18} {arguments.generation:<4} {found.instructions:12} {found.bytes:10} "
            f"{op.least:10} {found.bytes / op.least:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
