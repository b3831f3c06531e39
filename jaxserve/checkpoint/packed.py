"""Matrices in the Hub's quantised formats, each stored as several tensors.

`join_parts` finds such tensors in a folder. `packed_values.py` reads them. Knows neither families
nor JAX.

An int32 word holds n values, low bits first (3-bit values: 32 in three words, without gaps). A
matrix `X.weight` [out, in] is stored, by layout, as:

scaled:    `X.weight` int8 or e4m3; `X.weight_scale` [out, 1], [out] or one number.
fp8_block: `X.weight` e4m3; `X.weight_scale` [out / 128, in / 128].
packed:    `X.weight_packed` [out, in / n], values offset by half their range; `X.weight_scale`
           [out, groups]; if asymmetric, `X.weight_zero_point` [out / n, groups], offset alike;
           optionally `X.weight_g_idx` [in] and `X.weight_shape`.
gptq:      `X.qweight` [in / n, out]; `X.qzeros` [groups, out / n]; `X.scales` [groups, out];
           `X.g_idx` [in]. With 3 bits: [3 in / 32, out] and [groups, 3 out / 32].
awq:       `X.qweight` [in, out / 8]; `X.qzeros` [groups, out / 8]; `X.scales` [groups, out]; a
           word's columns are in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.tensors import Tensor

Layout = Literal["scaled", "fp8_block", "packed", "gptq", "awq"]
Shape = tuple[int, ...]

GPTQ_BITS = (4, 8, 2, 3)
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")
"""Suffixes of stored scales for an 8-bit KV cache. Ignored: our caches compute their own scales."""


class Packing(NamedTuple):
    """A layout with its bits, group size and zero-point rules."""

    layout: Layout
    bits: int
    group: int
    """Columns (along d_in) that share a scale; 0: all."""
    zero_plus: int = 0
    """Added to stored zero points."""
    symmetric: bool = True
    """True if no zero points are stored, or (`gptq`) all are the middle of the range."""
    in_order: bool = True
    """Whether a group's columns are neighbours."""
    own_numbers: bool = False
    """Whether single matrices may differ in layout (not with `gptq`), bits and group size. Shapes
    of their tensors then tell."""

    @property
    def unit(self) -> tuple[int, int]:
        """The smallest number of values that fill whole int32 words, and the number of words."""
        return (32, 3) if self.bits == 3 else (32 // self.bits, 1)

    def is_int4(self, columns: int, group: int) -> bool:
        """Whether a matrix of `columns` columns can stay INT4 with one scale per `group` columns
        (0: one scale per row)."""
        fits = self.group >= columns if group == 0 else self.group % group == 0
        return self.bits == 4 and self.group > 0 and fits

    def words(self, values: int) -> int:
        """Number of int32 words that hold `values` values."""
        of, words = self.unit
        return -(-values // of) * words


class PackedTensor(NamedTuple):
    """A matrix stored as several tensors; takes the place of a `Tensor`."""

    path: Path
    packing: Packing
    shape: Shape
    """Shape of the values to read: [d_out, d_in], or [d_out, groups] for scales and zero points."""
    parts: dict[str, Tensor]
    """Stored tensors by suffix of the name (`qweight`, `scales`, ...)."""
    kind: str = "packed"
    seen: Literal["numbers", "codes", "scales", "zeros"] = "numbers"
    """Result of reading: the dequantised numbers, or one part of an INT4 matrix."""
    group: int = 0
    """Columns per delivered scale or zero point; divides the group size of the packing."""

    def kept(self, dtype: np.dtype, group: int) -> "tuple[Tensor | PackedTensor, ...]":
        """Values, scales and, for INT4, zero points of the matrix as devices keep it; empty if it
        is stored in another format.

        Args:
          group: columns that share a scale in INT4; 0: all.
        """
        (d_out, d_in), packing = self.shape, self.packing
        grid = self._replace(seen="scales", shape=(d_out, -(-d_in // group) if group else 1))
        if dtype == ml_dtypes.int4 and packing.is_int4(d_in, group):
            grid = grid._replace(group=group or packing.group)
            return self._replace(seen="codes"), grid, grid._replace(seen="zeros")
        kept = packing.layout == "scaled" and self.values.dtype == dtype
        return (self.values, grid) if kept else ()

    @property
    def values(self) -> Tensor:
        """The 8-bit values; only for the layout `scaled`."""
        return self.parts["weight"]


def join_parts(
    tensors: Mapping[str, Tensor], matrices: Mapping[str, Shape], packing: Packing
) -> tuple[dict[str, Tensor | PackedTensor], list[str]]:
    """Replaces the parts of every packed matrix by one `PackedTensor`.

    Args:
      matrices: names (`X.weight`) and shapes of the matrices that may be packed.

    Returns:
      The tensors by name, and problems: parts that are missing or have a wrong shape.
    """
    joined: dict[str, Tensor | PackedTensor] = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(CACHE_SCALES)
    }
    problems = []
    for name, shape in matrices.items():
        base = name.removesuffix("weight")
        if len(shape) != 2 or not name.endswith(".weight"):
            continue
        own = _own(packing, shape, tensors, base) if packing.own_numbers else packing
        wanted, optional = _parts(own, shape)
        first = next(iter(wanted))
        main = tensors.get(base + first)
        if main is None or (first == "weight" and main.kind not in ("I8", "F8_E4M3")):
            continue
        if own.layout == "fp8_block":
            # DeepSeek's blocks by another name.
            joined.pop(f"{base}input_scale", None)
            if scales := joined.pop(f"{base}weight_scale", None):
                joined[f"{name}_scale_inv"] = scales
            continue
        parts = {}
        for suffix, shapes in (wanted | optional).items():
            part = joined.pop(base + suffix, None)
            if part is None and suffix in wanted:
                problems.append(f"missing {base}{suffix} {list(shapes[0])}")
            elif isinstance(part, Tensor):
                parts[suffix] = part
                if part.shape not in shapes:
                    known = " or ".join(str(list(shape)) for shape in shapes)
                    problems.append(f"{base}{suffix} is {list(part.shape)}, not {known}")
        joined[name] = PackedTensor(main.path, own, shape, parts)
    return joined, problems


def _own(packing: Packing, shape: Shape, tensors: Mapping[str, Tensor], base: str) -> Packing:
    """Derives a matrix's own layout, bits and group size from the shapes of its tensors. Where
    GPTQ's groups divide d_in unevenly, its `g_idx` gives the groups."""
    gptq = packing.layout == "gptq"
    values = tensors.get(base + ("qweight" if gptq else "weight_packed"))
    scales = tensors.get(base + ("scales" if gptq else "weight_scale"))
    if scales is None or not scales.shape or (gptq and values is None):
        return packing
    if values is None:
        blocks = tuple(-(-size // 128) for size in shape)
        block = scales.shape == blocks != (shape[0], 1)
        return packing._replace(layout="fp8_block" if block else "scaled", bits=8, group=0)
    axis = 0 if gptq else 1
    bits, groups = 32 * values.shape[axis] // shape[1], scales.shape[axis]
    if bits not in GPTQ_BITS or not 0 < groups <= shape[1]:
        return packing
    group = 0 if groups == 1 else -(-shape[1] // groups)
    if packing.group and groups == -(-shape[1] // packing.group):
        group = packing.group  # which is more than d_in, or does not divide it
    own = packing._replace(bits=bits, group=group)
    if gptq:
        return own
    symmetric, in_order = (
        f"{base}weight_{part}" not in tensors for part in ("zero_point", "g_idx")
    )
    return own._replace(layout="packed", symmetric=symmetric, in_order=in_order)


def _parts(packing: Packing, shape: Shape) -> tuple[dict[str, list[Shape]], dict[str, list[Shape]]]:
    """Allowed shapes by suffix: required tensors (the main one first), then optional ones."""
    (d_out, d_in), words = shape, packing.words
    groups = -(-d_in // packing.group) if packing.group else 1
    if packing.layout == "scaled":
        scales: list[Shape] = [(d_out, 1), (d_out,), (1,), ()]
        # Scales of activations, which stay floats here or get their own scales.
        return {"weight": [shape], "weight_scale": scales}, {"input_scale": [(1,), ()]}
    if packing.layout == "fp8_block":
        return {"weight": [shape]}, {}
    if packing.layout == "packed":
        zeros: dict[str, list[Shape]] = {"weight_zero_point": [(words(d_out), groups)]}
        needed: dict[str, list[Shape]] = {
            "weight_packed": [(d_out, words(d_in))],
            "weight_scale": [(d_out, groups)],
        }
        more: dict[str, list[Shape]] = {"weight_shape": [(2,)], "weight_g_idx": [(d_in,)]}
        return needed | ({} if packing.symmetric else zeros), more
    values = (d_in, words(d_out)) if packing.layout == "awq" else (words(d_in), d_out)
    gptq: dict[str, list[Shape]] = {"g_idx": [(d_in,)]}
    return {
        "qweight": [values],
        "qzeros": [(groups, words(d_out))],
        "scales": [(groups, d_out)],
    }, gptq if packing.layout == "gptq" else {}
