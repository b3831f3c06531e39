"""Calibrates a whole model, layer by layer.

Called by `checkpoint/conversion.py`, which reads float blocks and writes quantised ones. Memory
holds one layer's floats and integers, the rows of all samples, the inputs of one attention or FFN
part, and four matrices [d_in, d_in] of GPTQ in FP64, never the whole model. The rows that reach a
layer come from the quantised layers before it, so that each layer compensates for their errors.

If an expert saw too few samples, more text is taken. That text first passes through the finished
layers, which are read back from the output. After an interruption, all text does.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np

from jaxserve.calibration import forward
from jaxserve.calibration.gptq import INT8, RoundingTarget, dequantised
from jaxserve.calibration.layers import quantise_attention, quantise_ffn
from jaxserve.config.model import ModelConfig
from jaxserve.model.module import rms_norm

Leaves = dict[str, np.ndarray]


class CalibrationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Amount of text that a calibration takes."""

    expert_samples: int = 4
    """Samples that every expert should see (xDeepServe §4.7); 0: no minimum."""
    tokens: int = 8192
    """Tokens to start with; more are taken if experts see too few samples."""
    sequence: int = 512
    """Tokens of a sequence, which attend to each other."""


class CalibrationText(NamedTuple):
    """Text, settings and target format of a calibration."""

    settings: CalibrationSettings
    sequences: np.ndarray
    """Token ids of the available text, int [sequences, tokens]; only as many as needed are used."""
    target: RoundingTarget = INT8
    """Format of the quantised matrices. INT4 applies to FFNs only: attention stays float."""


class LayerReport(msgspec.Struct, frozen=True):
    """Report on the calibration of one layer."""

    layer: int
    tokens: int
    """Tokens that the layer saw."""
    strengths: dict[str, float]
    """SmoothQuant's α, by the leaf that writes the channels."""
    fewest: int | None
    """Samples of the expert that saw the fewest; None: the layer is dense."""
    rounded: dict[int, int]
    """Experts with too few samples → their samples; their weights are rounded to nearest."""


class CalibrationReport(msgspec.Struct, frozen=True):
    """Report on a whole calibration."""

    layers: list[LayerReport]


class BlockAccess(NamedTuple):
    """Functions that read blocks by name."""

    floats: Callable[[str], Leaves]
    """Returns the float leaves of a block of the original model."""
    done: Callable[[str], bool]
    """Whether the quantised block is already written."""
    written: Callable[[str], Leaves]
    """Returns the quantised leaves of a written block."""


def cut(token_ids: Sequence[int], settings: CalibrationSettings, positions: int) -> np.ndarray:
    """Cuts a text into sequences of equal length, int32 [sequences, tokens]. A rest is dropped; a
    shorter text becomes one sequence.

    Args:
      positions: longest sequence of the model.

    Raises:
      ValueError: the text has fewer than two tokens.
    """
    length = min(settings.sequence, positions, len(token_ids))
    if length < 2:
        raise ValueError(f"{len(token_ids)} tokens, calibration needs at least 2")
    count = len(token_ids) // length
    return np.asarray(token_ids[: count * length], np.int32).reshape(count, length)


class Calibrator:
    """Takes the rows of all samples through the layers and quantises each layer on the way.

    Args:
      config: the model, modules of multi-token prediction included.
      source: reads the model's blocks.
      calibration: text, settings and target format.
      on_report: called after every layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: BlockAccess,
        calibration: CalibrationText,
        on_report: Callable[[LayerReport], None] = lambda report: None,
    ):
        self._config, self._source, self._on_report = config, source, on_report
        self._settings, self._all, self._target = calibration
        self._embedding = source.floats("embedding")["table"]
        self._head_norm = source.floats("head")["norm"]
        length = self._all.shape[1]
        self._taken = min(max(-(-self._settings.tokens // length), 1), len(self._all))
        self._rows: np.ndarray | None = None

    def blocks(self) -> Iterator[tuple[str, Leaves | None]]:
        """Yields (name, quantised leaves) of both blocks of every layer, in order; None instead of
        leaves if the layer was written earlier."""
        for layer in range(self._config.all_layers):
            names = [f"layers.{layer}.{role}" for role in ("attention", "ffn")]
            if all(self._source.done(name) for name in names):
                self._rows = None
                yield from ((name, None) for name in names)
                continue
            if self._rows is None:
                self._rows = self.rows_before(layer, self._all[: self._taken])
            elif layer >= self._config.layers:
                self._rows = self._enter(layer, self._rows, self._all[: self._taken])
            yield from zip(names, self._layer(layer), strict=True)

    def _layer(self, layer: int) -> tuple[Leaves, Leaves]:
        """Quantises both blocks of a layer and takes the rows through it."""
        config = self._config
        kind = config.layer(layer)
        assert self._rows is not None
        names = (f"layers.{layer}.{role}" for role in ("attention", "ffn"))
        attention, ffn = map(self._source.floats, names)
        strengths: dict[str, float] = {}
        if self._target == INT8:
            _, inputs = forward.attend(config, kind.attention, attention, self._rows)
            matrices, strengths = quantise_attention(kind.attention, attention, inputs)
            del inputs
            for name, matrix in matrices.items():
                del attention[name]
                attention |= {f"{name}.values": matrix.values, f"{name}.scales": matrix.scales}
        rows = forward.attend(config, kind.attention, as_floats(attention), self._rows)[0]
        normed, routing = self._routed(layer, attention, rows)
        while (short := self._short(routing)) and self._taken < len(self._all):
            more = self._all[self._taken : 2 * self._taken]
            self._taken += len(more)
            before = self.rows_before(layer, more)
            behind = forward.attend(config, kind.attention, as_floats(attention), before)[0]
            rows = np.concatenate([rows, behind])
            normed, routing = self._routed(layer, attention, rows)
        enough = self._settings.expert_samples
        made = quantise_ffn(attention, ffn, normed, routing, enough, self._target)
        normed, routing = self._routed(layer, attention, rows)
        output = forward.feed_forward(made.matrices, normed, routing)
        self._rows = rows + output.reshape(rows.shape)
        fewest = int(made.counts.min()) if made.counts.size else None
        strengths["post_norm"] = made.strength
        self._on_report(LayerReport(layer, len(normed), strengths, fewest, short))
        return attention, made.matrices

    def _routed(
        self, layer: int, attention: Leaves, rows: np.ndarray
    ) -> tuple[np.ndarray, forward.RoutedRows | None]:
        normed = forward.normed_rows(self._config, attention["post_norm"], rows)
        rule = self._config.layer(layer).ffn.router
        return normed, forward.route(rule, attention, normed) if rule else None

    def _short(self, routing: forward.RoutedRows | None) -> dict[int, int]:
        """Experts that saw too few samples, with the number of samples."""
        if routing is None:
            return {}
        counts = np.bincount(routing.experts.reshape(-1), minlength=self._config.experts)
        few = np.flatnonzero(counts < self._settings.expert_samples)
        return {int(expert): int(counts[expert]) for expert in few}

    def rows_before(self, layer: int, token_ids: np.ndarray) -> np.ndarray:
        """Computes the rows that reach a layer through the written layers before it, FP32
        [sequences, tokens, d_model]. With `layer` = number of all layers: the final rows."""
        config = self._config
        rows = self._embedding[token_ids].astype(np.float32)
        for done in range(layer):
            if done >= config.layers:
                rows = self._enter(done, rows, token_ids)
            names = (f"layers.{done}.{role}" for role in ("attention", "ffn"))
            attention, ffn = map(self._source.written, names)
            attention = as_floats(attention)
            rows = forward.attend(config, config.layer(done).attention, attention, rows)[0]
            normed, routing = self._routed(done, attention, rows)
            rows = rows + forward.feed_forward(ffn, normed, routing).reshape(rows.shape)
        entered = config.layers <= layer < config.all_layers
        return self._enter(layer, rows, token_ids) if entered else rows

    def _enter(self, layer: int, rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Computes the input of a prediction module's layer from the rows after the layer before it
        (`model.prediction.Prediction`). A sequence's last row has no next token and is dropped."""
        config = self._config
        own = self._source.floats(f"layers.{layer}.prediction")
        norm = self._head_norm
        if layer > config.layers:
            norm = self._source.floats(f"layers.{layer - 1}.prediction")["norm"]
        step = layer - config.layers + 1
        hidden = self._normed(norm, rows[:, :-1])
        following = token_ids[:, step : step + hidden.shape[1]]
        embedded = self._embedding[following].astype(np.float32)
        both = {"token_norm": embedded, "hidden_norm": hidden}
        normed = [self._normed(own[name], each) for name, each in both.items()]
        joined = np.concatenate(normed, axis=-1)
        return joined @ np.asarray(own["projection"], np.float32).T

    def _normed(self, norm: np.ndarray, rows: np.ndarray) -> np.ndarray:
        weight = jnp.asarray(norm, jnp.float32)
        return np.asarray(rms_norm(jnp.asarray(rows), weight, self._config.norm_epsilon))


def as_floats(leaves: Leaves) -> Leaves:
    """A block's leaves with quantised matrices dequantised to FP32."""
    made: dict[str, Any] = {}
    for name, leaf in leaves.items():
        base, _, part = name.rpartition(".")
        if part == "values":
            made[base] = dequantised(leaf, leaves[f"{base}.scales"])
        elif part != "scales":
            made[name] = leaf
    return made
