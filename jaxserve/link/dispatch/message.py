"""Exactly what crosses from attention to ffn, packed into one array a message, and back.

One row a token: its quantised values, its scale (8-bit formats), and in MoE layers its expert ids
and gate weights, all as unsigned words of the values' width, side by side: a copy costs the host
per array, not per byte. Knows nothing of attention and ffn.
"""

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.lax import bitcast_convert_type
from jaxtyping import Array, Float, Int32, UInt, UInt32

from jaxserve.config.formats import FormatName
from jaxserve.link.dispatch.contract import Contract
from jaxserve.model.message import (
    DispatchMessage,
    EncodedRows,
    decode_rows,
    encode_rows,
    has_scales,
    storage,
)
from jaxserve.model.row_width import result_words, row_words
from pallas_kernels.grouped_matmul.packed_sums import Sums, unpack
from pallas_kernels.quantize.bits import from_words
from pallas_kernels.target import current_target

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_ROW_MAJOR = Layout(major_to_minor=(0, 1))


class MessageFormat(msgspec.Struct, frozen=True):
    """The layout of a row.

    Attributes:
      d_model: values a row.
      top_k: routed experts a row; 0 in dense layers.
      rows: format of the values.
    """

    d_model: int
    top_k: int
    rows: FormatName

    @property
    def word(self) -> jnp.dtype:
        """The unsigned dtype that a packed row is made of."""
        return jnp.dtype(_WORDS[storage(self.rows).itemsize])

    @property
    def width(self) -> int:
        """Words a row."""
        size, has_scale = self.word.itemsize, has_scales(self.rows)
        return row_words(self.d_model, self.top_k, size, has_scale=has_scale)

    def pack(self, message: DispatchMessage) -> UInt[Array, "tokens width"]:
        """Quantises and packs a message; ids travel as int32, scales and gates as FP32."""
        values, scales = message.encoded or encode_rows(message.tokens, self.rows)
        assert values.dtype == storage(self.rows)
        beside = []
        if scales is not None:
            beside.append(scales[:, None])
        if self.top_k:
            assert message.experts is not None
            assert message.gates is not None
            beside += [message.experts.astype(jnp.int32), message.gates.astype(jnp.float32)]
        words = [bitcast_convert_type(values, self.word)]
        if beside:
            bits = jnp.concatenate(
                [bitcast_convert_type(part, jnp.uint32) for part in beside], axis=1
            )
            words.append(to_words(bits, self.word))
        padding = self.width - sum(part.shape[1] for part in words)
        words.append(jnp.zeros((values.shape[0], padding), self.word))
        return jnp.concatenate(words, axis=1)

    @property
    def experts_at(self) -> int:
        """First word of a row's expert ids."""
        return self.d_model + has_scales(self.rows) * 4 // self.word.itemsize

    def padding(self, rows: int) -> np.ndarray:
        """Returns packed rows of zeros whose expert ids are -1, so that no expert gets them."""
        made = np.zeros((rows, self.width), self.word)
        first, words = self.experts_at, 4 // self.word.itemsize
        made[:, first : first + self.top_k * words] = np.iinfo(self.word).max
        return made

    def unpack(self, packed: UInt[Array, "tokens width"], dtype: jnp.dtype) -> DispatchMessage:
        """Unpacks a message, with tokens dequantised to `dtype`.

        Keeps rows as rows. XLA would otherwise transpose a message gathered from other devices, and
        transpose the dequantised rows back (v7x, as in `row_words`: 732 thousand cycles, not 524).
        """
        packed = with_layout_constraint(packed, _ROW_MAJOR)
        values = bitcast_convert_type(packed[:, : self.d_model], storage(self.rows))  # one a word
        # Scale, ids and gates at once: every byte of a number is a program's instruction on TPUs.
        beside = has_scales(self.rows) + 2 * self.top_k
        if not beside:
            return DispatchMessage(decode_rows(values, None, dtype), None, None)
        used = self.d_model + beside * 4 // self.word.itemsize
        bits = from_words(packed[:, self.d_model : used], jnp.uint32)
        scales = bitcast_convert_type(bits[:, 0], jnp.float32) if has_scales(self.rows) else None
        tokens = decode_rows(values, scales, dtype)
        encoded = wide = None
        if scales is not None:
            wide = EncodedRows(bitcast_convert_type(packed, values.dtype), scales)
            # On TPUs XLA cuts and converts in a pass of its own, and all kernels read what came.
            on_tpu = current_target().backend == "mosaic_tpu"
            encoded = wide if on_tpu else EncodedRows(values, scales)
        if not self.top_k:
            return DispatchMessage(tokens, None, None, encoded, wide)
        experts, gates = jnp.split(bits[:, -2 * self.top_k :], 2, axis=1)
        experts, gates = (
            bitcast_convert_type(experts, jnp.int32),
            bitcast_convert_type(gates, jnp.float32),
        )
        return DispatchMessage(tokens, experts, gates, encoded, wide)


class AnswerFormat(msgspec.Struct, frozen=True):
    """Layout of a row of an answer: its values and, if these are quantised, their scale.

    Attributes:
      d_model: values a row.
      rows: format of the values.
    """

    d_model: int
    rows: FormatName

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the array."""
        return storage(self.rows)

    @property
    def width(self) -> int:
        """Columns of the array."""
        return result_words(self.d_model) if has_scales(self.rows) else self.d_model

    def pack(self, results: Sums) -> Array:
        """Packs results for the link, [rows, width]."""
        if has_scales(self.rows):
            return results.packed(self.width)
        return results.total(self.dtype)

    def pieces(self, results: Sums, count: int) -> tuple[Array, ...]:
        """Packs results in this number of equal parts of the rows."""
        if has_scales(self.rows):
            return results.pieces(self.width, count)
        return tuple(jnp.split(self.pack(results), count))

    def total(self, answers: Sequence[Array], dtype: jnp.dtype) -> Float[Array, "rows d_model"]:
        """Returns the sum of packed answers in `dtype`, made in FP32."""
        rows = [unpack(one, self.d_model) for one in answers] if has_scales(self.rows) else answers
        total = functools.reduce(operator.add, [one.astype(jnp.float32) for one in rows])
        return total.astype(dtype)


def to_words(bits: UInt32[Array, "rows numbers"], word: jnp.dtype) -> Array:
    """Cuts numbers into words, lowest bits first, like a bit-cast. XLA does not fuse a bit-cast
    with the code that makes the numbers; this saves a launch on GPUs."""
    size = 8 * word.itemsize
    shift = np.arange(0, 32, size, dtype=np.uint32)
    return (bits[:, :, None] >> shift).astype(word).reshape(bits.shape[0], -1)


def message_formats(contract: Contract) -> dict[str, MessageFormat]:
    """The formats of a model's messages, by the kind of the layer's FFN."""
    return {
        kind: MessageFormat(
            contract.d_model, contract.top_k if kind == "moe" else 0, contract.dispatch
        )
        for kind in dict.fromkeys(contract.layers)
    }


def answer_format(contract: Contract) -> AnswerFormat:
    """The format of all answers."""
    return AnswerFormat(contract.d_model, contract.combine)


class PackedRows(NamedTuple):
    """Rows of a message as the exchange handles them (`model.ffn.exchange.RowPacking`)."""

    format: MessageFormat
    dtype: jnp.dtype
    """The dtype that rows are dequantised to."""

    def unpack(self, packed: UInt[Array, "rows words"]) -> DispatchMessage:
        """Unpacks the rows."""
        return self.format.unpack(packed, self.dtype)

    def addressed(
        self, packed: UInt[Array, "rows words"], slots: Int32[Array, "rows top_k"]
    ) -> UInt[Array, "rows words"]:
        """Replaces the expert ids of packed rows."""
        form = self.format
        words = to_words(bitcast_convert_type(slots, jnp.uint32), form.word)
        return jax.lax.dynamic_update_slice_in_dim(packed, words, form.experts_at, axis=1)
