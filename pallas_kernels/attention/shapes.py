"""Attention shapes of real models, by name: for tests, benchmarks and bundle counts.

A shape is one device's share, so a model appears with the tensor parallelism that its size
requires. Knows nothing of kernels.
"""

from typing import NamedTuple


class AttentionShape(NamedTuple):
    """Attention of one device and layer.

    Attributes:
      q_heads, kv_heads: heads of this device.
      head_dim: width of queries and keys.
      v_width: width of the values.
      shared: values are the first `v_width` elements of the keys (absorbed latent attention).
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_width: int
    shared: bool = False

    def kv_elements(self) -> int:
        """Elements of the cache per token."""
        width = self.head_dim if self.shared else self.head_dim + self.v_width
        return self.kv_heads * width

    def flops(self) -> int:
        """Floating-point operations per query token and KV token: scores and mixing."""
        return 2 * self.q_heads * (self.head_dim + self.v_width)


SHAPES = {
    "step3": AttentionShape(q_heads=64, kv_heads=1, head_dim=256, v_width=256),
    "deepseek-v3": AttentionShape(q_heads=128, kv_heads=1, head_dim=576, v_width=512, shared=True),
    "deepseek-v3-tp8": AttentionShape(
        q_heads=16, kv_heads=1, head_dim=576, v_width=512, shared=True
    ),
    "qwen3-235b": AttentionShape(q_heads=64, kv_heads=4, head_dim=128, v_width=128),
    "qwen3-235b-tp4": AttentionShape(q_heads=16, kv_heads=1, head_dim=128, v_width=128),
}
"""Step-3 (MFA), DeepSeek-V3 (absorbed MLA), Qwen3-235B-A22B (GQA); `-tp`: heads split over N."""

MANY_KV_HEADS = {
    "qwen3-8b": AttentionShape(q_heads=32, kv_heads=8, head_dim=128, v_width=128),
    "qwen3-32b": AttentionShape(q_heads=64, kv_heads=8, head_dim=128, v_width=128),
    "16 heads x 128": AttentionShape(q_heads=16, kv_heads=16, head_dim=128, v_width=128),
    "16 heads x 64": AttentionShape(q_heads=16, kv_heads=16, head_dim=64, v_width=64),
}
"""Shapes whose blocks of keys and values are large: dense models of Qwen3 (GQA), and attention in
which every query head has its own keys."""

NAIVE = {"deepseek-v3": (128, 192, 128), "deepseek-v3-tp8": (16, 192, 128)}
"""Heads and widths of keys and values of the latent shapes when they are not absorbed, as a prefill
takes them (`chunk_attention`)."""

DECODE = ((64, 8192, 1), (128, 8192, 1), (64, 32768, 1))
"""(sequences, KV length, queries of each) of the decode steps that benchmarks run."""

SEVERAL = ((64, 8192, 4), (4, 8192, 512))
"""(sequences, KV length, queries of each) of a step that verifies drafts and of prefill chunks."""
