"""Quantises one layer to INT8, or its FFN to INT4: smooths channels, rounds matrices with GPTQ.

Called by `run.py` with a layer's float leaves and the rows that reach it. `folds` lists, by
attention family, which leaves write and which matrices read a set of channels. In FFNs a norm
writes the input of router, gate and up, and up writes the input of down.

SmoothQuant divides channels with wide activations where they are written, and multiplies them where
they are read, so that neither side is hard to quantise (arXiv 2211.10438; xDeepServe §4.7). Scales
are powers of two: dividing and multiplying by them is exact in every float format. So the smoothed
model is the same function, bit for bit in FP32 and BF16, and a router that reads the channels sees
the same logits.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.calibration.forward import Leaves, RoutedRows, gated, unit, units
from jaxserve.calibration.gptq import (
    INT8,
    LARGEST,
    Hessian,
    IntMatrix,
    RoundingTarget,
    gptq,
    rounded,
    row_scales,
)
from jaxserve.config.attention.gqa import GQA
from jaxserve.config.attention.mfa import MFA
from jaxserve.config.attention.mla import MLA
from jaxserve.config.model import Attention

STRENGTHS = (0.0, 0.35, 0.5, 0.65, 0.8)
"""How much of a channel's width moves from activations to weights (the paper's α); 0: none."""
ROWS = 256
"""Most rows of inputs on which strengths are compared."""


class Reader(NamedTuple):
    """A matrix that reads the channels, with samples of its input."""

    weight: np.ndarray
    """FP32 [d_out, d_in]."""
    rows: np.ndarray
    """FP32 [samples, d_in]."""


class Smoothing(NamedTuple):
    """Divisors of the channels, and the strength that they come from."""

    scales: np.ndarray
    """FP32 [channels], powers of two."""
    strength: float


def smoothed(
    rows: np.ndarray,
    columns: np.ndarray,
    readers: Sequence[Reader],
    group: int = 1,
    target: RoundingTarget = INT8,
) -> Smoothing:
    """Chooses the strength with the smallest error of the readers' quantised products, compared
    with their FP32 products.

    Args:
      rows: largest magnitude of every channel in the readers' inputs, [channels · group].
      columns: largest magnitude of the readers' weights per channel, same shape.
      readers: matrices to compare on; may be a sample of all readers.
      group: number of query heads that read the same head's channels. If above 1, `rows` and
        `columns` are [heads, group, width].
      target: format of the quantised readers. If inputs stay floats, smoothing only makes weights
        of wide channels be rounded more finely (AWQ, arXiv 2306.00978).
    """
    if group > 1:
        rows, columns = rows.max(axis=1), columns.max(axis=1)
    shape = rows.shape
    tried = [
        Smoothing(_scales(rows.reshape(-1), columns.reshape(-1), strength), strength)
        for strength in STRENGTHS
    ]

    def error(one: Smoothing) -> float:
        spread = spread_over(one.scales, shape, group)
        return sum(_error(reader, spread, target) for reader in readers)

    return min(tried, key=error)


def spread_over(scales: np.ndarray, shape: tuple[int, ...], group: int) -> np.ndarray:
    """Repeats scales of channels [heads · width] for the readers' columns
    [heads · group · width]."""
    if group == 1:
        return scales
    heads, width = shape
    return np.repeat(scales.reshape(heads, 1, width), group, axis=1).reshape(-1)


def widest(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The largest magnitude of every column over all parts [rows, columns]."""
    return np.max([np.abs(part).max(axis=0, initial=0.0) for part in parts], axis=0)


def _scales(rows: np.ndarray, columns: np.ndarray, strength: float) -> np.ndarray:
    """Scales max|X|^α / max|W|^(1 - α) (the paper's equation 4), rounded to a power of two; 1 for
    channels whose inputs or weights are all zero."""
    if strength == 0:
        return np.ones(rows.shape, np.float32)
    used = (rows > 0) & (columns > 0)
    x, w = np.where(used, rows, 1.0), np.where(used, columns, 1.0)
    power = np.rint(strength * np.log2(x) - (1 - strength) * np.log2(w))
    return np.where(used, np.exp2(np.clip(power, -60, 60)), 1.0).astype(np.float32)


def _error(reader: Reader, scales: np.ndarray, target: RoundingTarget) -> float:
    """Squared error of the reader's products when weights are rounded to the target, and inputs to
    INT8 with one scale per token if the target says so."""
    step = -(-len(reader.rows) // ROWS) or 1
    rows = reader.rows[::step]
    if not len(rows):
        return 0.0
    x = rows / scales
    if target.int8_rows:
        x_scales = row_scales(x)
        x = np.clip(np.rint(x / x_scales), -LARGEST, LARGEST) * x_scales
    difference = x @ rounded(reader.weight * scales, target).floats.T - rows @ reader.weight.T
    return float(np.sum(np.square(difference, dtype=np.float64)))


Block = MutableMapping[str, np.ndarray]
"""Float leaves of a block, which smoothing changes."""

TRIED_EXPERTS = 4
"""Number of experts, those with the most rows, on which smoothing strengths are compared."""


class Fold(NamedTuple):
    """A set of channels: the leaves that write them, and the matrices that read them."""

    written: tuple[tuple[str, int], ...]
    """(leaf, row of channel 0) of each writer; the other channels are the following rows."""
    readers: tuple[str, ...]
    heads: int = 1
    """Number of K/V heads; the channels are [heads, width]."""
    group: int = 1
    """Query heads that read one K/V head's channels; readers' columns are [heads, group, width]."""


def folds(sizes: Attention, leaves: Leaves) -> list[Fold]:
    """The folds of the attention part of a layer, by attention family."""
    if isinstance(sizes, MFA):
        first = sizes.latent + sizes.kv_heads * sizes.head_dim
        group = sizes.q_heads // sizes.kv_heads
        return [
            Fold((("input_norm", 0),), ("attention.down",)),
            Fold((("attention.inter_norm", 0),), ("attention.up",)),
            Fold((("attention.down", first),), ("attention.out",), sizes.kv_heads, group),
        ]
    if isinstance(sizes, GQA):
        readers = ("attention.query", "attention.key", "attention.value")
        writers = ("attention.value", "attention.value_bias")
        value = tuple((name, 0) for name in writers if name in leaves)
        group = sizes.q_heads // sizes.kv_heads
        return [
            Fold((("input_norm", 0),), readers),
            Fold(value, ("attention.out",), sizes.kv_heads, group),
        ]
    assert isinstance(sizes, MLA)
    readers = ("attention.down", *(() if sizes.q_latent else ("attention.query_up",)))
    found = [
        Fold((("input_norm", 0),), readers),
        Fold((("attention.value_up", 0),), ("attention.out",), sizes.q_heads),
    ]
    if sizes.q_latent:
        found.append(Fold((("attention.query_norm", 0),), ("attention.query_up",)))
    return found


def quantise_attention(
    sizes: Attention, block: Block, inputs: Mapping[str, np.ndarray]
) -> tuple[dict[str, IntMatrix], dict[str, float]]:
    """Quantises the attention part's matrices to INT8; smooths its other leaves in place.

    Args:
      block: float leaves; `post_norm` and the router are not changed.
      inputs: input of each fold's readers, [samples, d_in], by the first reader.

    Returns:
      Matrices by leaf, and the strength of every fold by the first leaf that writes its channels.
    """
    strengths, divided = {}, {}
    all_folds = folds(sizes, block)
    for fold in all_folds:
        rows = inputs[fold.readers[0]]
        shape = (fold.heads, fold.group, -1) if fold.group > 1 else (-1,)
        readers = [Reader(_float(block[name]), rows) for name in fold.readers]
        found = smoothed(
            np.abs(rows).max(axis=0).reshape(shape),
            widest(reader.weight for reader in readers).reshape(shape),
            readers,
            fold.group,
        )
        for name, row in fold.written:
            divide(block, name, found.scales, row)
        width = len(found.scales) // fold.heads
        spread = spread_over(found.scales, (fold.heads, width), fold.group)
        for name in fold.readers:
            multiply(block, name, spread)
        divided[fold] = rows / spread
        strengths[fold.written[0][0]] = found.strength
    matrices: dict[str, IntMatrix] = {}
    # Only now: later folds divide rows of matrices whose columns earlier folds have multiplied.
    for fold in all_folds:
        hessian = Hessian(divided.pop(fold))
        matrices |= {name: gptq(_float(block[name]), hessian) for name in fold.readers}
    return matrices, strengths


class FFNResult(NamedTuple):
    """A quantised FFN part."""

    matrices: dict[str, np.ndarray]
    """Leaves `NAME.values` and `NAME.scales`."""
    strength: float
    """Smoothing strength of the channels that the preceding norm writes."""
    counts: np.ndarray
    """int [experts]: samples that each expert saw; empty for a dense FFN."""


def quantise_ffn(
    attention: Block,
    block: Leaves,
    normed: np.ndarray,
    routing: RoutedRows | None,
    enough: int,
    target: RoundingTarget = INT8,
) -> FFNResult:
    """Quantises the FFN part's matrices to INT8 or INT4; smooths the norm and the router before it
    in place.

    Args:
      attention: leaves of the layer's attention part, which has `post_norm` and `router.gate`.
      normed: FP32 [samples, d_model], the norm's output before smoothing.
      enough: with fewer samples, an expert's weights are rounded to nearest.
    """
    everyone = list(units(block, routing))
    seen = {
        expert: normed if expert is None or routing is None else normed[routing.rows_of(expert)[0]]
        for _, expert in everyone
    }
    experts = [place for place in everyone if place[1] is not None]
    counts = np.array([len(seen[expert]) for _, expert in experts], int)
    busiest = sorted(experts, key=lambda place: -len(seen[place[1]]))
    tried = [place for place in everyone if place[1] is None] + busiest[:TRIED_EXPERTS]
    columns = widest(unit(block, *place, part) for place in everyone for part in ("gate", "up"))
    readers = [
        Reader(unit(block, *place, part), seen[place[1]])
        for place in tried
        for part in ("gate", "up")
    ]
    found = smoothed(np.abs(normed).max(axis=0), columns, readers, target=target)
    divide(attention, "post_norm", found.scales)
    if "router.gate" in attention:
        multiply(attention, "router.gate", found.scales)
    made: dict[str, np.ndarray] = {}
    for name, expert in everyone:
        own = seen.pop(expert) / found.scales
        parts = _quantise_unit(block, name, expert, found.scales, own, enough, target)
        for part, matrix in parts.items():
            _put(made, f"{name}.{part}", matrix, block[f"{name}.{part}"].shape, expert)
    return FFNResult(made, found.strength, counts)


def _quantise_unit(
    block: Leaves,
    name: str,
    expert: int | None,
    scales: np.ndarray,
    rows: np.ndarray,
    enough: int,
    target: RoundingTarget,
) -> dict[str, IntMatrix]:
    """Quantises gate, up and down of one FFN. `rows` are its inputs, already divided by `scales`;
    gate and up are multiplied by them."""
    gate, up, down = (unit(block, name, expert, part) for part in ("gate", "up", "down"))
    gate, up = gate * scales, up * scales
    if len(rows) < enough:
        parts = {"gate": gate, "up": up, "down": down}
        return {part: rounded(matrix, target) for part, matrix in parts.items()}
    hidden = gated(rows, gate, up)
    reader = Reader(down, hidden)
    own = smoothed(np.abs(hidden).max(axis=0), widest([down]), [reader], target=target)
    up, down = up / own.scales[:, None], down * own.scales
    both = gptq(np.concatenate([gate, up]), Hessian(rows), target)
    halves = slice(len(gate)), slice(len(gate), None)
    first, second = (IntMatrix(both.values[half], both.scales[half]) for half in halves)
    # The input that down will see, including the rounding errors of gate and up.
    hidden = gated(rows, first.floats, second.floats)
    return {"gate": first, "up": second, "down": gptq(down, Hessian(hidden), target)}


def _put(
    made: dict[str, np.ndarray],
    name: str,
    matrix: IntMatrix,
    shape: Sequence[int],
    expert: int | None,
) -> None:
    """Stores a matrix as leaves `NAME.values` and `NAME.scales`; an expert's matrix goes into a
    stack of `shape[0]` experts."""
    for part, values in (("values", matrix.values), ("scales", matrix.scales)):
        if expert is None:
            made[f"{name}.{part}"] = values
            continue
        full = (shape[0], *values.shape)
        stack = made.setdefault(f"{name}.{part}", np.zeros(full, values.dtype))
        stack[expert] = values


def _float(leaf: np.ndarray) -> np.ndarray:
    return np.asarray(leaf, np.float32)


def divide(block: Block, name: str, scales: np.ndarray, first: int = 0) -> None:
    """Divides rows of a leaf, from row `first` on, by `scales` (powers of two), in place."""
    leaf = np.array(block[name])
    rows = leaf.reshape(-1, leaf.shape[-1] if leaf.ndim > 1 else 1)
    own = rows[first : first + len(scales)]
    own[...] = (own.astype(np.float32) / scales[:, None]).astype(leaf.dtype)
    block[name] = rows.reshape(leaf.shape)


def multiply(block: Block, name: str, scales: np.ndarray) -> None:
    """Multiplies the columns of a matrix by `scales` (powers of two), in place."""
    leaf = block[name]
    block[name] = (leaf.astype(np.float32) * scales).astype(leaf.dtype)
