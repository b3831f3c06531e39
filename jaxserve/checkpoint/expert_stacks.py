"""Matrices of all experts of a layer in one tensor, as gpt-oss's folders have them.

`hf.py` reads them as a tensor X of matrices [experts, d_out, d_in], each in one of two layouts:

MXFP4:  `X_blocks` uint8 [experts, d_out, d_in / 32, 16], two numbers a byte, the first one low;
        `X_scales` uint8 [experts, d_out, d_in / 32], powers of two as exponents plus 127 (OCP
        Microscaling Formats 1.0). BF16 represents the products of both exactly.
floats: `X` [experts, d_in, d_out], as transformers writes it.

DeepSeek-V4 has a matrix of every expert in MXFP4: `X` int8 [d_out, d_in / 2] and `X_scale_inv`
[d_out, d_in / 32].

Pure NumPy; knows neither families nor JAX.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve.checkpoint.reading import Region, read_regions
from jaxserve.checkpoint.source import CheckpointNames, Shape
from jaxserve.checkpoint.tensors import Tensor

GROUP = 32
"""Numbers along d_in that share a scale in MXFP4."""
MXFP4 = "MXFP4"
"""Kind of a stack in MXFP4, beside safetensors' names of dtypes."""
BYTES = "U8", "I8", "F8_E8M0"
"""Kinds of tensors with values or scales of MXFP4."""


class ExpertStack(NamedTuple):
    """The matrices of all experts; takes the place of a `Tensor`."""

    path: Path
    kind: str
    """Dtype of floats by its safetensors name, or `MXFP4`."""
    shape: Shape
    """[experts, d_out, d_in], or of one expert [d_out, d_in]."""
    values: Tensor
    """Floats [experts, d_in, d_out], or bytes of MXFP4 values [experts, d_out, d_in / 2]."""
    scales: Tensor | None = None
    """Scales of MXFP4 values [experts, d_out, d_in / 32]; None: floats."""

    def read(self, region: Region, on_read: Callable[[int], None]) -> None:
        """Fills a region of floats, whose rows lie a whole number of matrix rows apart.

        Raises:
          CheckpointError: a file is missing or has become shorter.
        """
        _, d_out, d_in = self.shape
        row, column = divmod(region.first, d_in)
        step, columns = region.stride // d_in, region.columns
        expert, row = divmod(row, d_out)
        outputs = step * (region.rows - 1) + 1
        numbers = np.empty((columns, outputs), self.values.dtype)
        first = (expert * d_in + column) * d_out + row
        read_regions([Region(self.values, first, d_out, columns, outputs, numbers)], on_read)
        region.target[...] = numbers[:, ::step].T


def join_stacks(
    tensors: Mapping[str, Any], names: CheckpointNames
) -> tuple[dict[str, Any], list[str]]:
    """Replaces the tensors of every stack of experts by one `ExpertStack`.

    Returns:
      the tensors by name, and problems: tensors that are missing or have a wrong shape.
    """
    joined, problems = dict(tensors), []
    sources = [source for layer in names.ffn for source in layer.values() if source.expert_stack]
    for name, shape in {k: v for source in sources for k, v in source.tensors.items()}.items():
        *outer, d_out, d_in = shape
        grid, found = (*outer, d_out, -(-d_in // GROUP)), joined.get(name)
        wanted: dict[str, Shape]
        if not outer and found and found.kind == "I8":
            wanted = {name: (d_out, d_in // 2), f"{name}_scale_inv": grid}
            scales = joined.get(f"{name}_scale_inv", found)._replace(kind="U8")
            stack = ExpertStack(found.path, MXFP4, shape, found._replace(kind="U8"), scales)
        elif outer and found:
            wanted = {name: (*outer, d_in, d_out)}
            stack = ExpertStack(found.path, found.kind, shape, found)
        elif blocks := joined.get(f"{name}_blocks"):
            wanted = {f"{name}_blocks": (*grid, GROUP // 2), f"{name}_scales": grid}
            packed = blocks._replace(shape=(*outer, d_out, d_in // 2))
            scales = joined.get(f"{name}_scales", blocks)
            stack = ExpertStack(blocks.path, MXFP4, shape, packed, scales)
        else:
            continue  # `hf.py` says that it is missing
        for part, size in wanted.items():
            own = joined.pop(part, None)
            if own is None:
                problems.append(f"missing {part} {list(size)}")
            elif own.shape != size or (stack.scales and own.kind not in BYTES):
                kind = " U8" if stack.scales else ""
                said = f"{part} is {own.kind} {list(own.shape)}"
                problems.append(f"{said}, not{kind} {list(size)}")
        joined[name] = stack
    return joined, problems
