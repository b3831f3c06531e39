"""What a family's checkpoint calls things: config keys and tensor names, as data.

One table a family. A leaf of a template (`module.Template`) is made of one or several tensors,
stored [out, in], that stand side by side in its last axis after transposing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.errors import CheckpointError

Shape = tuple[int, ...]


class Source(NamedTuple):
    """Where a leaf comes from: tensors side by side along the leaf's last axis."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Shape of each tensor in the file."""
    transpose: bool = False
    """Whether the file holds the last two axes the other way round."""


Sources = dict[str, Source]


class CheckpointNames(NamedTuple):
    """Every tensor of a model, by block and leaf name."""

    embedding: Sources
    head: Sources
    attention: list[Sources]
    """One a layer, as are `ffn`'s."""
    ffn: list[Sources]
    unloaded: dict[str, Shape]
    """Tensors that belong to the model and have no leaf yet (multi-token prediction)."""
    optional: dict[str, Shape]
    """Tensors that repeat others and may be missing."""
    ignored: tuple[str, ...]
    """Prefixes of tensors of other parts (a vision tower)."""


class _Entries:
    """Typed entries of a config.json. What is wrong is gathered, and said all at once."""

    def __init__(self, tree: Mapping[str, Any]):
        self._tree = tree
        self.problems: list[str] = []

    def size(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """The first of these that is there, a whole number."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return self._wrong(name, value, f"a whole number from {least}", least)
        return value

    def number(self, *names: str) -> float:
        """Likewise, a number above 0."""
        name, value = self._first(names, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            return self._wrong(name, value, "a number above 0", 1.0)
        return float(value)

    def flag(self, name: str) -> bool:
        """A truth value, false where it is missing."""
        value = self._tree.get(name)
        if value is not None and not isinstance(value, bool):
            return self._wrong(name, value, "true or false", False)
        return bool(value)

    def raise_problems(self) -> None:
        """Raises CheckpointError if there is a problem."""
        if self.problems:
            raise CheckpointError("config.json: " + "; ".join(self.problems))

    def _first(self, names: tuple[str, ...], default: int | None) -> tuple[str, Any]:
        for name in names:
            if self._tree.get(name) is not None:
                return name, self._tree[name]
        return " or ".join(names), default

    def _wrong[Value](self, name: str, value: Any, wanted: str, instead: Value) -> Value:
        """Notes a problem; reading goes on with `instead`."""
        problem = f"{name} is missing" if value is None else f"{name} = {value!r} is not {wanted}"
        self.problems.append(problem)
        return instead


def step3_config(tree: Mapping[str, Any]) -> ModelConfig:
    """Step-3's config.json: `step3_vl` with a `text_config`, or the text model alone.

    Raises:
      CheckpointError: with every entry that is missing, of a wrong type, or not supported.
    """
    text = tree if tree.get("text_config") is None else tree["text_config"]
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config = {text!r} is not an object")
    rope = text.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"config.json: rope_parameters = {rope!r} is not an object")
    entries = _Entries({**rope, **{k: v for k, v in text.items() if v is not None}})
    problems = entries.problems
    for scaling in (text.get("rope_scaling"), rope):
        kind = scaling.get("rope_type", "default") if isinstance(scaling, Mapping) else scaling
        if kind not in (None, "default"):
            problems.append(f"rope_scaling = {scaling!r} is not supported here")
    layers = entries.size("num_hidden_layers")
    mtp_layers = entries.size("num_nextn_predict_layers", least=0, default=0)
    moe_layers = _layer_set(text.get("moe_layers_enum"), layers, problems)
    # A model without experts need not say how large they are.
    none = None if moe_layers or mtp_layers else 0
    config = ModelConfig(
        vocab=entries.size("vocab_size"),
        d_model=entries.size("hidden_size"),
        layers=layers,
        q_heads=entries.size("num_attention_heads"),
        kv_heads=entries.size("num_attention_groups"),
        head_dim=entries.size("head_dim", least=2),
        latent=entries.size("share_q_dim"),
        d_ff=entries.size("intermediate_size"),
        moe_layers=moe_layers,
        experts=entries.size("moe_num_experts", least=0, default=none),
        top_k=entries.size("moe_top_k", least=0, default=none),
        expert_d_ff=entries.size("moe_intermediate_size", least=0, default=none),
        shared_d_ff=entries.size("share_expert_dim", least=0, default=none),
        renormalise=entries.flag("norm_expert_weight"),
        rope_theta=entries.number("rope_theta"),
        norm_epsilon=entries.number("rms_norm_eps"),
        max_positions=entries.size(
            "max_position_embeddings", "max_position_embedding", "max_seq_len"
        ),
        tied_head=entries.flag("tie_word_embeddings"),
        mtp_layers=mtp_layers,
    )
    entries.raise_problems()
    if config.q_heads % config.kv_heads:
        problems.append(
            f"num_attention_heads = {config.q_heads} is no multiple of num_attention_groups = "
            f"{config.kv_heads}"
        )
    if config.head_dim % 2:
        problems.append(f"head_dim = {config.head_dim} is odd, and RoPE turns pairs")
    if beyond := sorted(layer for layer in moe_layers if not 0 <= layer < layers):
        problems.append(f"moe_layers_enum names {beyond} of {layers} layers")
    if moe_layers and not 1 <= config.top_k <= config.experts:
        problems.append(f"moe_top_k = {config.top_k} of moe_num_experts = {config.experts}")
    entries.raise_problems()
    return config


def _layer_set(value: Any, layers: int, problems: list[str]) -> frozenset[int]:
    """`"4,5,6"`, `[4, 5, 6]` or a tuple; where nothing is said, all layers but the first."""
    if value is None:
        return frozenset(range(1, layers))
    items = value.split(",") if isinstance(value, str) else value
    try:
        return frozenset(int(item) for item in items if str(item).strip())
    except (TypeError, ValueError):
        problems.append(f"moe_layers_enum = {value!r} is not a list of layers")
        return frozenset()


def step3_names(config: ModelConfig) -> CheckpointNames:
    """Step-3's tensors."""
    d, vocab = config.d_model, config.vocab
    table = Source(("model.embed_tokens.weight",), ((vocab, d),))
    head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
    return CheckpointNames(
        embedding={"table": table},
        head={
            "norm": _vector("model.norm.weight", d),
            "weight": Source((head,), ((vocab, d),), transpose=True),
        },
        attention=[
            _step3_attention(config, f"model.layers.{layer}.", config.kind(layer))
            for layer in range(config.layers)
        ],
        ffn=[
            _step3_ffn(config, f"model.layers.{layer}.", config.kind(layer))
            for layer in range(config.layers)
        ],
        unloaded=_step3_mtp(config),
        optional=_step3_mtp_copies(config),
        ignored=("vision_model.", "vit_"),
    )


def _vector(name: str, size: int) -> Source:
    return Source((name,), ((size,),))


def _matrix(name: str, d_out: int, d_in: int) -> Source:
    return Source((name,), ((d_out, d_in),), transpose=True)


def _step3_attention(config: ModelConfig, layer: str, kind: LayerKind) -> Sources:
    d, attention = config.d_model, f"{layer}self_attn."
    heads, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    down = ("q_proj", "k_proj", "v_proj")
    sources = {
        "input_norm": _vector(f"{layer}input_layernorm.weight", d),
        "attention.down": Source(
            tuple(f"{attention}{name}.weight" for name in down),
            ((config.latent, d), (kv, d), (kv, d)),
            transpose=True,
        ),
        "attention.inter_norm": _vector(f"{attention}inter_norm.weight", config.latent),
        "attention.up": _matrix(f"{attention}wq.weight", heads, config.latent),
        "attention.out": _matrix(f"{attention}o_proj.weight", d, heads),
        "post_norm": _vector(f"{layer}post_attention_layernorm.weight", d),
    }
    if kind == "moe":
        sources["router.gate"] = _matrix(f"{layer}moe.gate.weight", config.experts, d)
    return sources


def _step3_ffn(config: ModelConfig, layer: str, kind: LayerKind) -> Sources:
    d, experts, d_ff = config.d_model, config.experts, config.expert_d_ff
    if kind == "dense":
        return _swiglu("dense", f"{layer}mlp.", d, config.d_ff)
    sources: Sources = {}
    if config.shared_d_ff:
        sources |= _swiglu("dense", f"{layer}share_expert.", d, config.shared_d_ff)
    for leaf in ("gate", "up"):
        sources[f"experts.{leaf}"] = Source(
            (f"{layer}moe.{leaf}_proj.weight",), ((experts, d_ff, d),), transpose=True
        )
    sources["experts.down"] = Source(
        (f"{layer}moe.down_proj.weight",), ((experts, d, d_ff),), transpose=True
    )
    return sources


def _swiglu(block: str, prefix: str, d: int, d_ff: int) -> Sources:
    return {
        f"{block}.gate": _matrix(f"{prefix}gate_proj.weight", d_ff, d),
        f"{block}.up": _matrix(f"{prefix}up_proj.weight", d_ff, d),
        f"{block}.down": _matrix(f"{prefix}down_proj.weight", d, d_ff),
    }


def _step3_mtp(config: ModelConfig) -> dict[str, Shape]:
    """The multi-token-prediction modules' tensors: DeepSeek-V3's form, stored as further layers."""
    tensors: dict[str, Shape] = {}
    d = config.d_model
    for layer in _mtp_prefixes(config):
        tensors |= {
            f"{layer}enorm.weight": (d,),
            f"{layer}hnorm.weight": (d,),
            f"{layer}eh_proj.weight": (d, 2 * d),
            f"{layer}shared_head.norm.weight": (d,),
        }
        for sources in (
            _step3_attention(config, layer, "moe"),
            _step3_ffn(config, layer, "moe"),
        ):
            for source in sources.values():
                tensors |= dict(zip(source.names, source.shapes, strict=True))
    return tensors


def _step3_mtp_copies(config: ModelConfig) -> dict[str, Shape]:
    """Embedding and head once more, as DeepSeek-V3's modules have them."""
    shape = (config.vocab, config.d_model)
    names = ("embed_tokens.weight", "shared_head.head.weight")
    return {f"{layer}{name}": shape for layer in _mtp_prefixes(config) for name in names}


def _mtp_prefixes(config: ModelConfig) -> list[str]:
    return [f"model.layers.{config.layers + index}." for index in range(config.mtp_layers)]


class Family(NamedTuple):
    """How to read one family."""

    config: Any
    names: Any


FAMILIES: dict[str, Family] = {
    "step3_vl": Family(step3_config, step3_names),
    "step3_text": Family(step3_config, step3_names),
}
"""By `model_type` of config.json."""
