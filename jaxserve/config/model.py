"""The architecture of a model, in one vocabulary for all families.

`checkpoint/families` reads a family's config.json into a `ModelConfig`; everything above works from
it and never checks a model's name.
"""

from typing import Literal, NamedTuple

import msgspec

from jaxserve.config.formats import Floats, StoredFormat
from jaxserve.errors import ConfigError

Platform = Literal["cpu", "gpu", "tpu"]
FFNKind = Literal["dense", "moe"]


def platform_of(name: str) -> Platform:
    """Returns the platform that JAX, a device kind or a hardware file names."""
    if name.lower().startswith("tpu"):
        return "tpu"
    return "cpu" if name == "cpu" else "gpu"


def held_floats(role: str, weights: str, dtype: Floats, floats: Floats, *, on_cpus: bool) -> Floats:
    """Returns the dtype in which a role holds matrices that are not quantised.

    The role's `weights` decide. Otherwise it is the dtype of the files if that is exact, and the
    activations' dtype if not.

    Args:
      dtype: dtype of the activations.
      floats: see `ModelConfig`.

    Raises:
      ConfigError: BF16 weights beside FP32 activations are asked for on other devices than CPUs.
    """
    if weights == "bfloat16" and dtype == "float32" and not on_cpus:
        raise ConfigError(
            f"{role}.weights = bfloat16 beside dtype = float32: only CPUs convert while they "
            "multiply; elsewhere weights are in dtype, or in 8 or 4 bits"
        )
    stays = weights == "bfloat16" or (weights != "float32" and floats == "bfloat16")
    return "bfloat16" if on_cpus and stays else dtype


class LayerKind(NamedTuple):
    """The kind of a layer; layers of one kind run the same programs."""

    ffn: FFNKind
    window: int = 0
    """Size of the attention window, the token itself included; 0: unlimited."""
    int8_products: bool = False
    """Whether attention multiplies in INT8 (`attention.int8_products`)."""

    def __str__(self) -> str:
        return self.ffn + "_window" * bool(self.window) + "_int8" * self.int8_products


class Yarn(msgspec.Struct, frozen=True, kw_only=True):
    """RoPE frequencies for contexts longer than the training's (arXiv 2309.00071)."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the borders of the ramp are rounded to whole dimensions."""
    magnitude: float = 1.0
    """Factor applied to cosine and sine."""


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding."""

    theta: float
    yarn: Yarn | None = None
    interleaved: bool = False
    """Whether pairs are neighbours, (0, 1), (2, 3), … instead of halves, (0, d/2), …"""
    columns: int = 0
    """Number of a head's columns that are rotated, from the first on; 0: all."""


class MFA(msgspec.Struct, frozen=True, kw_only=True, tag="mfa"):
    """Multi-matrix factorization attention (Step-3 §2.2)."""

    q_heads: int
    kv_heads: int
    head_dim: int
    latent: int
    """Width of the low-rank query (share_q_dim)."""


class GQA(msgspec.Struct, frozen=True, kw_only=True, tag="gqa"):
    """Grouped-query attention."""

    q_heads: int
    kv_heads: int
    head_dim: int
    qk_norm: Literal["none", "heads", "columns"] = "none"
    """RMSNorms of q and k before RoPE: `heads` norms every head with the same weights; `columns`
    norms all heads of a token together, with a weight for every column."""
    qkv_bias: bool = False
    out_bias: bool = False


class MLA(msgspec.Struct, frozen=True, kw_only=True, tag="mla"):
    """Multi-head latent attention (DeepSeek-V2 §2.1)."""

    q_heads: int
    q_latent: int
    """Width of the low-rank query; 0: the query has one matrix."""
    kv_latent: int
    nope_dim: int
    """Dimensions of a head that are not rotated."""
    rope_dim: int
    v_dim: int
    scale: float
    """Softmax scale of the scores, YaRN's factor included."""
    bias: bool = False
    """Whether the down projections of query and latent, and the output projection, have a bias."""
    latent_epsilon: float = 1e-6
    """Epsilon of the norms of the query latent and the KV latent."""

    @property
    def kv_heads(self) -> int:
        """All query heads share the one latent."""
        return 1


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens choose their experts."""

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    float32_logits: bool = False
    """Whether the logits are computed in FP32 and not in the model's dtype."""
    renormalise: bool = False
    """Whether the chosen experts' scores are divided by their sum."""
    scaling: float = 1.0
    """Factor applied to the gate weights."""
    bias: bool = False
    """Whether a bias is added to the scores for the selection, but not to the gate weights."""
    groups: int = 1
    """Number of expert groups; a token chooses experts from its `top_groups` best groups only."""
    top_groups: int = 1


class Int4(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How INT4 matrices are scaled."""

    group: int = 128
    """Inputs that share a scale."""
    zero_points: bool = False
    """Whether a group has a zero point, too (as in AWQ)."""


MatrixPart = Literal["attention", "dense", "experts"]
"""Part of a layer that a matrix belongs to: attention, the dense FFN or shared expert, or routed
experts."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of pre-norm layers: attention, and a dense FFN or a mixture of experts."""

    vocab: int
    d_model: int
    layers: int
    attention: MFA | GQA | MLA
    rope: Rope
    d_ff: int = 0
    """Hidden width of a dense layer."""
    moe_layers: frozenset[int] = frozenset()
    router: Router | None = None
    expert_d_ff: int = 0
    shared_d_ff: int = 0
    """Hidden width of the shared expert (of all of them together); 0: none."""
    window: int = 0
    """Attention window of the `window_layers`, in tokens."""
    window_layers: frozenset[int] = frozenset()
    norm_epsilon: float
    max_positions: int
    tied_head: bool = False
    stored: StoredFormat = "plain"
    """How the checkpoint stores its matrices: `plain` floats, or 8 or 4 bits. `fp8_block` has a
    scale per block of 128 × 128; `fp8` and `int8` a scale per output channel; `int4` as `int4`
    says."""
    int4: Int4 = Int4()
    """Scales of `stored` int4, and of matrices that become INT4 on loading."""
    plain_parts: frozenset[MatrixPart] = frozenset()
    """Parts that the checkpoint keeps as floats all the same."""
    floats: Floats = "float32"
    """Dtype of the checkpoint's float matrices: `bfloat16` if all are, otherwise `float32`, which
    represents the values of both."""
    platform: Platform = "tpu"
    """Platform that runs the ffn role, or the whole model. On CPUs float matrices lie input by
    input, and may be narrower than the activations (`model/float_matrices.py`)."""
    mtp_layers: int = 0
    """Multi-token-prediction modules in the checkpoint (for speculative decoding)."""
    modules: int = 0
    """Prediction modules that are loaded; each has a decoder layer, numbered behind `layers`."""
    int8_layers: frozenset[int] = frozenset()
    """Layers whose attention multiplies in INT8 in this deployment; never those of modules."""

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 in a dense model."""
        return self.router.experts if self.router else 0

    @property
    def top_k(self) -> int:
        """Routed experts of a token."""
        return self.router.top_k if self.router else 0

    @property
    def all_layers(self) -> int:
        """Decoder layers, including those of loaded modules."""
        return self.layers + self.modules

    def kind(self, layer: int) -> LayerKind:
        """The kind of a layer; modules have experts (DeepSeek-V3 §2.2)."""
        if layer >= self.layers:
            return LayerKind("moe")
        return LayerKind(
            "moe" if layer in self.moe_layers else "dense",
            self.window if layer in self.window_layers else 0,
            layer in self.int8_layers,
        )

    def kinds(self) -> list[LayerKind]:
        """The distinct kinds, in order of first occurrence."""
        return list(dict.fromkeys(self.kind(layer) for layer in range(self.all_layers)))

    def runs(self) -> list[tuple[LayerKind, int, int]]:
        """Maximal runs of layers of one kind, as (kind, first layer, one past the last layer);
        without those of modules."""
        runs: list[tuple[LayerKind, int, int]] = []
        for layer in range(self.layers):
            kind = self.kind(layer)
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1], layer + 1)
            else:
                runs.append((kind, layer, layer + 1))
        return runs
