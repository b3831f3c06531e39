"""Expert layers of real models, by name, as one device sees them.

Tests compile them, the bench runs them. Knows nothing of how a kernel cuts them.
"""

from typing import NamedTuple


class ExpertShape(NamedTuple):
    """One device's part of an expert layer.

    Attributes:
      d_model: width of a row.
      d_ff: columns of the gate and of the up projection on this device.
      groups: experts on this device; 1 with `experts` 1 is a shared expert or a dense FFN.
      experts: routed experts of the layer, on all devices.
      top_k: experts a token.
    """

    d_model: int
    d_ff: int
    groups: int
    experts: int
    top_k: int

    def rows(self, tokens: int) -> int:
        """The rows that `tokens` tokens of the layer bring to this device, if experts are even."""
        return -(-tokens * self.top_k * self.groups // self.experts)


SHAPES = {
    "step3": ExpertShape(7168, 5120, groups=48, experts=48, top_k=3),
    "step3_shared": ExpertShape(7168, 5120, groups=1, experts=1, top_k=1),
    # Two attention and two FFN instances of 8 devices: experts over 2, their columns over 8.
    "step3_2a2f": ExpertShape(7168, 640, groups=24, experts=48, top_k=3),
    # 16 devices with 3 whole experts each: rows are sent to the experts.
    "step3_ep16": ExpertShape(7168, 5120, groups=3, experts=48, top_k=3),
    # Two instances, each with half of the shared expert's columns, for all rows.
    "step3_half_shared": ExpertShape(7168, 2560, groups=1, experts=1, top_k=1),
    "step3_2a2f_shared": ExpertShape(7168, 640, groups=1, experts=1, top_k=1),
    "deepseek_v3": ExpertShape(7168, 2048, groups=256, experts=256, top_k=8),
    "deepseek_v3_ep32": ExpertShape(7168, 2048, groups=8, experts=256, top_k=8),
    "qwen3_235b": ExpertShape(4096, 1536, groups=128, experts=128, top_k=8),
    "qwen3_235b_ep8": ExpertShape(4096, 1536, groups=16, experts=128, top_k=8),
}

DECODE_TOKENS = (128, 512, 2048)
"""Tokens of a decode step that share the expert layer, of all attention devices."""

PREFILL_TOKENS = (8192, 16384)
