"""Cases of the bench and the tuner: every named shape in every format at every size, by name.

Knows the ops' steps; measures nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pallas_kernels.attention.shapes import DECODE, SEVERAL
from pallas_kernels.attention.shapes import SHAPES as ATTENTION
from pallas_kernels.bench import attention, grouped_matmul, norm_quantize
from pallas_kernels.grouped_matmul.shapes import DECODE_TOKENS, PREFILL_TOKENS
from pallas_kernels.grouped_matmul.shapes import SHAPES as EXPERTS
from pallas_kernels.norm_quantize import cases as norms
from pallas_kernels.target import Target, current_target

NAMES: dict[str, dict[str, Any]] = {
    "attention": {**ATTENTION},
    "grouped_matmul": {**EXPERTS},
    "norm_quantize": {**norms.WIDTHS},
}

MODULES: dict[str, Any] = {
    "attention": attention,
    "grouped_matmul": grouped_matmul,
    "norm_quantize": norm_quantize,
}
"""Modules of the ops, each with `inputs(step)`, `call(step)` and `checked(arguments)`."""

TILED = ("attention", "grouped_matmul")
"""Ops that have tiles to tune."""

INTERPRETED = Target("mosaic_tpu", "interpreted TPU", interpret=True)
"""Target of a quick search: kernels that the CPU interprets."""


class Case(NamedTuple):
    """An op at one size."""

    op: str
    name: str
    step: Any

    def size(self) -> dict[str, int]:
        """Numbers of the step, by name."""
        return {key: value for key, value in self.step._asdict().items() if isinstance(value, int)}

    def label(self) -> str:
        """Name that tells the case from all others."""
        sizes = " ".join(f"{key} {value}" for key, value in self.size().items())
        return f"{self.op} {self.name} {self.step.format} {sizes}"


def cases(ops: list[str], names: list[str] | None, quick: bool) -> list[Case]:
    """Lists the cases of these ops and named shapes (None: all); quick: tiny ones, each once."""
    found: dict[tuple[str, Any], Case] = {}
    for op in ops:
        for name, shape in NAMES[op].items():
            if names and name not in names:
                continue
            for step in STEPS[op](shape, quick):
                found.setdefault((op, step), Case(op, name, step))
    return list(found.values())


def page_size() -> int:
    """Returns the tokens of a page that the kernels of this platform prefer."""
    return 128 if current_target().backend == "mosaic_tpu" else 64


def _attention(shape: Any, quick: bool) -> list[attention.Step]:
    small = shape._replace(q_heads=shape.kv_heads * 2) if quick else shape
    sizes = ((2, 256, 1),) if quick else DECODE + SEVERAL
    return [
        attention.Step(small, format, sequences, context, page_size(), queries)
        for sequences, context, queries in sizes
        for format in attention.FORMATS
    ]


def _experts(shape: Any, quick: bool) -> list[grouped_matmul.Step]:
    if quick:
        shape = shape._replace(d_model=128, d_ff=128, groups=4 if shape.groups > 1 else 1)
    return [
        grouped_matmul.Step(shape, format, tokens)
        for tokens in ((8,) if quick else DECODE_TOKENS + PREFILL_TOKENS)
        for format in grouped_matmul.FORMATS
    ]


def _norms(width: int, quick: bool) -> list[norm_quantize.Step]:
    return [
        norm_quantize.Step(128 if quick else width, format, tokens)
        for tokens in ((8,) if quick else (norms.DECODE, norms.PREFILL))
        for format in norm_quantize.FORMATS
    ]


STEPS: dict[str, Callable[[Any, bool], Sequence[Any]]] = {
    "attention": _attention,
    "grouped_matmul": _experts,
    "norm_quantize": _norms,
}
"""Functions that list the steps of a named shape, or tiny ones."""
