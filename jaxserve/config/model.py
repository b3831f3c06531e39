"""The architecture of a model, in one vocabulary for all families.

`checkpoint/families` reads a family's config.json into a `ModelConfig`; everything above works from
it and never checks a model's name.
"""

import functools
import itertools
from collections.abc import Collection
from typing import Literal, NamedTuple

import msgspec

from jaxserve.config.formats import Floats, StoredFormat
from jaxserve.errors import ConfigError
from pallas_kernels.activation import SWIGLU, Activation

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


class Llama3(msgspec.Struct, frozen=True, kw_only=True):
    """RoPE frequencies of Llama 3.1 for contexts longer than the training's."""

    factor: float
    original_positions: int
    low: float
    """Turns within the original positions below which a pair is slowed down by the factor."""
    high: float
    """Turns from which a pair stays; between both it is interpolated."""


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding."""

    theta: float
    yarn: Yarn | None = None
    llama3: Llama3 | None = None
    interleaved: bool = False
    """Whether pairs are neighbours, (0, 1), (2, 3), … instead of halves, (0, d/2), …"""
    columns: int = 0
    """Number of a head's columns that are rotated, from the first on; 0: all."""


class Indexer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chooses the cached tokens that a token attends to (DeepSeek-V3.2 §2.1)."""

    heads: int
    head_dim: int
    """Width of queries and keys, of which the first columns are rotated, as many as MLA's."""
    top_k: int
    """Tokens that are chosen. A token with no more before it attends to all."""
    interleaved: bool = False
    """Whether the indexer rotates neighbours, as `Rope.interleaved`."""
    shared: bool = False
    """Whether the layer attends to what the last indexer before it has chosen, and has none."""


class Expansion(NamedTuple):
    """Costs of attention to keys and values that are made of cached latents (DeepSeek-V2 §2.1)."""

    least: float
    """Tokens of the shortest chunk that takes less time so, off TPUs; infinity: no chunk does."""
    width: int
    """Numbers of a token's keys and values, all heads."""
    products: int
    """Multiplications that make a token's keys and values."""


class Attention:
    """Sizes of a layer's attention, and what other code asks of its kind: no module compares
    kinds. A kind is a frozen struct in a file of its own, which overrides what differs."""

    __slots__ = ()

    computed_by: str
    """Module and class that compute this kind. The class may declare the arrays of its cache
    (`entries`), those that kernels walk over (`walk`), and other pages than the tokens' (`placed`).
    """
    q_heads: int
    kv_heads: int = 1
    """Heads of cached rows; 1: all query heads share them."""
    head_dim: int
    """Width of a query, a key and a value, where all have the same."""
    rope: Rope | None = None
    window: int = 0
    """Tokens that a token attends to, itself included; 0: all."""
    indexer: Indexer | None = None
    """None: a token attends to all tokens before it that its window has."""
    every: int = 0
    """Tokens that a compressed row stands for; 0: there are none."""
    copies_heads: bool = True
    """Whether several `tp` devices may hold copies of a head of the cache."""
    splits_rows: bool = False
    """Whether `cache.rope` may keep the rotated part of a cached row apart."""

    @property
    def divided(self) -> dict[str, int]:
        """Sizes that `attention.tp` divides, by their names in messages."""
        return {"query heads": self.q_heads}

    @property
    def rotated(self) -> int:
        """Columns that RoPE's angles belong to."""
        return self.head_dim

    @property
    def own_indexer(self) -> Indexer | None:
        """The indexer, unless it is that of a layer before."""
        return self.indexer if self.indexer and not self.indexer.shared else None

    @property
    def floats_alone(self) -> bool:
        """Whether attention cannot multiply in INT8 (`attention.int8_products`)."""
        return self.indexer is not None

    @property
    def rows_a_token(self) -> float:
        """Cached rows that a token adds, those that only windows read left out where others are
        compressed."""
        return 1.0

    @property
    def state_numbers(self) -> int:
        """Numbers of the state that a sequence has instead of rows; 0: it has rows."""
        return 0

    @property
    def pair_flops(self) -> float:
        """FLOPs of a token with one that it attends to, all heads: q·k and p·v."""
        return 4.0 * self.q_heads * self.head_dim

    @property
    def expansion(self) -> Expansion | None:
        """Attention of prompts to expanded keys and values; None: the cache has them."""
        return None

    @property
    def head_width(self) -> int:
        """Numbers computed for a head and token: queries before and after RoPE, mixed values."""
        return 3 * self.head_dim


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens choose their experts."""

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    float32_logits: bool = False
    """Whether the logits are computed in FP32 and not in the model's dtype."""
    renormalise: bool = False
    """Whether the chosen experts' scores are divided by their sum."""
    scaling: float = 1.0
    """Factor applied to the gate weights."""
    bias: bool = False
    """Whether a bias is added to the scores for the selection, but not to the gate weights."""
    logit_bias: bool = False
    """Whether a bias is added to the logits."""
    token_table: int = 0
    """Rows of a table with the experts of every token id, which then do not depend on the scores;
    0: the model has none."""
    groups: int = 1
    """Number of expert groups; a token chooses experts from its `top_groups` best groups only."""
    top_groups: int = 1


class FFN(msgspec.Struct, frozen=True, kw_only=True):
    """The feed-forward part of a layer: a dense SwiGLU network, or routed experts, beside which
    there may be a shared one."""

    d_ff: int = 0
    """Hidden width of the dense network or of the shared expert (of all of them together); 0: none.
    """
    activation: Activation = SWIGLU
    router: RouterSpec | None = None
    """None: the layer is dense."""
    gated: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a linear map of the token.
    """
    expert_d_ff: int = 0
    """Hidden width of a routed expert."""
    expert_activation: Activation = SWIGLU
    expert_bias: bool = False
    """Whether the three matrices of a routed expert have biases."""

    @property
    def kind(self) -> FFNKind:
        """Kind of the layer's messages: with `moe` they carry experts and gate weights, too."""
        return "moe" if self.router else "dense"

    @property
    def experts(self) -> int:
        """Number of routed experts."""
        return self.router.experts if self.router else 0


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """A residual of several streams, which every sublayer reads as one row and mixes
    (manifold-constrained hyper-connections, DeepSeek-V4 §2.2)."""

    count: int
    iterations: int
    """Steps of the Sinkhorn-Knopp algorithm, which makes the mixing matrix doubly stochastic."""
    epsilon: float
    """Added to sums that divide."""


class LayerKind(NamedTuple):
    """The kind of a layer; layers of one kind run the same programs."""

    attention: Attention
    ffn: FFN
    int8_products: bool = False
    """Whether attention multiplies in INT8 (`attention.int8_products`)."""

    def __str__(self) -> str:
        window, int8 = "_window" * bool(self.attention.window), "_int8" * self.int8_products
        limit = "_limit" * any(
            one.limit for one in (self.ffn.activation, self.ffn.expert_activation)
        )
        table = "_table" * bool(self.ffn.router and self.ffn.router.token_table)
        state = "_state" * (self.attention.state_numbers > 0)
        every = f"_{self.attention.every}" * (self.attention.every > 0)
        shared = "_shared" * (self.attention.indexer is not self.attention.own_indexer)
        return f"{self.ffn.kind}{window}{every}{state}{shared}{table}{limit}{int8}"


class Int4(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How matrices in 4 bits are scaled."""

    group: int = 128
    """Inputs that share a scale."""
    zero_points: bool = False
    """Whether a group has a zero point, too (as in AWQ)."""


MatrixPart = Literal["attention", "dense", "experts"]
"""Part of a layer that a matrix belongs to: attention, the dense FFN or shared expert, or routed
experts."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A decoder of pre-norm layers: attention, and a dense FFN or a mixture of experts."""

    vocab: int
    d_model: int
    decoder: tuple[LayerKind, ...]
    """Kinds of the decoder layers, in order."""
    predictors: tuple[LayerKind, ...] = ()
    """Kinds of the layers of the multi-token-prediction modules in the checkpoint."""
    norm_epsilon: float
    max_positions: int
    tied_head: bool = False
    stored: StoredFormat = "plain"
    """How the checkpoint stores its matrices: `plain` floats, or 8 or 4 bits. `fp8_block` has a
    scale per block of 128 × 128; `fp8` and `int8` a scale per output channel; `int4` and `mxfp4`
    as `int4` says."""
    int4: Int4 = Int4()
    """Scales of `stored` matrices in 4 bits, and of matrices that become INT4 on loading."""
    plain_parts: frozenset[MatrixPart] = frozenset()
    """Parts that the checkpoint keeps as floats all the same."""
    floats: Floats = "float32"
    """Dtype of the checkpoint's float matrices: `bfloat16` if all are, otherwise `float32`, which
    represents the values of both."""
    platform: Platform = "tpu"
    """Platform that runs the ffn role, or the whole model. On CPUs float matrices lie input by
    input, and may be narrower than the activations (`model/matrix_formats.py`)."""
    modules: int = 0
    """Prediction modules that are loaded; their layers are numbered behind the decoder's."""
    own_heads: bool = False
    """Whether every prediction module has an output matrix of its own instead of the head's. Such
    modules take hidden states before the model's final norm, and pass on theirs before their own.
    """
    unit_norms: bool = False
    """Whether norms multiply by 1 + weight. The 1 is added on loading, in FP32."""
    streams: Streams | None = None
    """None: the residual is one stream, to which sublayers add their output."""

    @property
    def residual_width(self) -> int:
        """Columns of a token's residual: the streams, and for each the factor with which the output
        of a sublayer under way is added to it; or one stream, and behind it chosen positions."""
        own = self.streams.count * (self.d_model + 1) if self.streams else self.d_model
        return own + self.choice_width

    @property
    def choice_width(self) -> int:
        """Columns for the positions that indexers pass on to layers that share them, three for
        each (`attention/mla.py`); 0: no layer shares an indexer."""
        indexers = (spec.indexer for spec in self.attentions())
        return max((3 * one.top_k for one in indexers if one and one.shared), default=0)

    @property
    def recurrent(self) -> bool:
        """Whether sequences have states, which each step replaces: nothing can be computed again
        from the middle of a sequence."""
        return any(spec.state_numbers for spec in self.attentions())

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.decoder)

    @property
    def all_layers(self) -> int:
        """Decoder layers, including those of loaded modules."""
        return self.layers + self.modules

    @functools.cached_property
    def moe(self) -> FFN:
        """The FFN of a layer with routed experts, of which all have the same sizes; one without
        anything in a dense model."""
        return next((kind.ffn for kind in self.decoder + self.predictors if kind.ffn.router), FFN())

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 in a dense model."""
        return self.moe.experts

    @property
    def top_k(self) -> int:
        """Routed experts of a token."""
        router = self.moe.router
        return router.top_k if router else 0

    def layer(self, number: int) -> LayerKind:
        """The kind of a layer, counted through the decoder and the modules behind it."""
        return (self.decoder + self.predictors)[number]

    def with_int8_products(self, layers: Collection[int]) -> "ModelConfig":
        """The model whose attention multiplies in INT8 in these decoder layers, and no others.

        Raises:
          ConfigError: a layer has attention that multiplies in floats alone.
        """
        kinds = [kind._replace(int8_products=n in layers) for n, kind in enumerate(self.decoder)]
        for number, kind in enumerate(kinds):
            if kind.int8_products and kind.attention.floats_alone:
                raise ConfigError(
                    f"attention.int8_products: layer {number} attends in floats alone"
                )
        return msgspec.structs.replace(self, decoder=tuple(kinds))

    def kinds(self) -> list[LayerKind]:
        """The distinct kinds, in order of first occurrence."""
        return list(dict.fromkeys(map(self.layer, range(self.all_layers))))

    def attentions(self) -> list[Attention]:
        """The distinct attention specs, in order of first occurrence."""
        return list(dict.fromkeys(kind.attention for kind in self.kinds()))

    @functools.cached_property
    def page_unit(self) -> int:
        """Tokens that a page must hold a multiple of: the most that one compressed row stands
        for."""
        return max([1, *(spec.every for spec in self.attentions())])

    def runs(self) -> list[tuple[LayerKind, int, int]]:
        """Maximal runs of layers of one kind, as (kind, first layer, one past the last layer);
        without those of modules."""
        runs, start = [], 0
        for kind, layers in itertools.groupby(self.decoder):
            stop = start + len([*layers])
            runs.append((kind, start, stop))
            start = stop
        return runs
