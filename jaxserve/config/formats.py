"""Number formats: how each one stores numbers, and where it may be used.

Choices of the configuration, checks, capacity, wire, cache, checkpoint readers and the planner ask
this table. A new format of the KV cache is an entry here and kernels that read it.
"""

from typing import Literal, TypeGuard

import msgspec

FormatName = Literal["float32", "bfloat16", "fp8", "fp8_block", "int8", "int4", "mxfp4"]
AskedFormat = FormatName | Literal["auto"]
Floats = Literal["float32", "bfloat16"]
StoredFormat = Literal["plain", "fp8", "fp8_block", "int8", "int4", "mxfp4"]
"""Formats of matrices in checkpoints and on devices; `plain`: floats."""


class NumberFormat(msgspec.Struct, frozen=True):
    """How numbers are stored.

    Attributes:
      bits: bits of a number.
      dtype: JAX's name of the storage dtype.
      products: format of the matrix products that take such numbers without conversion, on hardware
        that has them.
      scales: what shares a scale, by use: nothing (empty), a row on the wire, an output channel, a
        block or a group of a matrix, a token and head of the cache. Other uses are not offered.
        Uses are `weights` (of a role), `stored` (matrices in checkpoints and on devices),
        `dispatch`, `combine` and `cache`.
      group: columns that share a scale, where no file or option may choose another number; else 0.
      scale_bytes: bytes of a scale; 1: a power of two (ue8m0).
    """

    bits: int
    dtype: str
    products: str
    scales: dict[str, str]
    group: int = 0
    scale_bytes: int = 4


_PLAIN = {"weights": "", "dispatch": "", "cache": ""}
_FP8 = {"weights": "channel", "stored": "channel", "dispatch": "row", "cache": "token"}
_GROUPS = {"weights": "group", "stored": "group"}
FORMATS = {
    "float32": NumberFormat(32, "float32", "float32", _PLAIN),
    "bfloat16": NumberFormat(16, "bfloat16", "bfloat16", _PLAIN),
    "fp8": NumberFormat(8, "float8_e4m3fn", "fp8", _FP8),
    "fp8_block": NumberFormat(8, "float8_e4m3fn", "fp8", {"stored": "block"}),
    "int8": NumberFormat(8, "int8", "int8", _FP8 | {"combine": "row"}),
    "int4": NumberFormat(4, "int4", "int8", _GROUPS),
    "mxfp4": NumberFormat(4, "float4_e2m1fn", "mxfp4", _GROUPS, group=32, scale_bytes=1),
}


def choices(use: str) -> list[str]:
    """Returns the names of the formats that a use offers."""
    return [name for name, one in FORMATS.items() if use in one.scales]


def sharing(name: str) -> str:
    """Returns what shares a scale of a stored matrix: channel, block or group; empty: nothing."""
    return FORMATS[name].scales.get("stored", "") if name in FORMATS else ""


def group_of(name: str) -> int:
    """Returns `NumberFormat.group` of a stored matrix; 0 for a name of no format."""
    return FORMATS[name].group if name in FORMATS else 0


def scaled(name: str) -> TypeGuard[StoredFormat]:
    """Returns whether numbers of a format share scales; false for a name of no format."""
    return name in FORMATS and any(FORMATS[name].scales.values())
