"""The architectures of the tiny models: config.json's entries and the tensors' names and shapes.

One dataclass a family, its fields named as in config.json; their defaults are in
`golden/reference/tiny_sizes.yaml`. `tiny_models.py` adds the weights.
"""

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Spelling = Literal["released", "transformers 5"]
"""How config.json is written: as the released models have it, or as transformers 5 saves it."""

Shapes = dict[str, tuple[int, ...]]

VOCAB = 97
BOS, EOS = 0, 1

_GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "reference"
ENTRIES, SIZES = (
    yaml.safe_load((_GOLDEN / f"tiny_{name}.yaml").read_text()) for name in ("entries", "sizes")
)


def sizes(family: str, *bases: type) -> Any:
    """A dataclass with the sizes of a family, which are its defaults."""
    fields = [
        (name, Any, tuple(value) if isinstance(value, list) else value)
        for name, value in SIZES[family].items()
    ]
    return make_dataclass(family, fields, bases=bases, frozen=True)


@dataclass(frozen=True)
class Yarn:
    """The entries of RoPE scaling by YaRN, named as in config.json; None: left out."""

    factor: float = 4.0
    original_max_position_embeddings: int = 64
    beta_fast: float | None = 32.0
    beta_slow: float | None = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def entries(self) -> dict[str, Any]:
        """Fields of config.json, without the type."""
        return {key: value for key, value in vars(self).items() if value is not None}


class TinyDeepseek(sizes("deepseek")):
    """The sizes of a tiny DeepSeek-V3 or Kimi K2, named as in config.json."""

    def config(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The content of config.json, but for the dtype and the quantisation."""
        entries = {key: value for key, value in vars(self).items() if key not in _ROPE}
        entries |= _common("DeepseekV3ForCausalLM") | {
            "num_key_value_heads": self.num_attention_heads
        }
        if spelling == "released":
            scaling = self.yarn and {"type": "yarn", **self.yarn.entries()}
            return entries | {
                "rope_theta": self.rope_theta,
                "rope_scaling": scaling,
                "ep_size": 1,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
            }
        assert self.moe_layer_freq == 1, "transformers 5 has no such key"
        entries.pop("moe_layer_freq")
        return entries | {
            "rope_parameters": _rope_parameters(self.rope_theta, self.yarn),
            "rope_interleave": True,
            "head_dim": self.qk_rope_head_dim,
            "qk_head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "output_router_logits": False,
            "pad_token_id": None,
            "pretraining_tp": 1,
        }

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts; the MTP modules after the last layer have."""
        return layer >= self.num_hidden_layers or (
            layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        )

    def shapes(self) -> Shapes:
        """Name in the checkpoint -> shape, [out, in] for projections."""
        hidden = self.hidden_size
        shapes = _outer_shapes(hidden, tied=self.tie_word_embeddings)
        for layer in range(self.num_hidden_layers + self.num_nextn_predict_layers):
            prefix = f"model.layers.{layer}."
            shapes |= prefixed(prefix, self._layer_shapes(moe=self.is_moe(layer)))
            if layer >= self.num_hidden_layers:
                shapes |= prefixed(
                    prefix,
                    {
                        "embed_tokens.weight": (VOCAB, hidden),
                        "enorm.weight": (hidden,),
                        "hnorm.weight": (hidden,),
                        "eh_proj.weight": (hidden, 2 * hidden),
                        "shared_head.norm.weight": (hidden,),
                        "shared_head.head.weight": (VOCAB, hidden),
                    },
                )
        return shapes

    def _layer_shapes(self, *, moe: bool) -> Shapes:
        hidden, heads = self.hidden_size, self.num_attention_heads
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        shapes: Shapes = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.kv_a_proj_with_mqa.weight": (latent, hidden),
            "self_attn.kv_a_layernorm.weight": (self.kv_lora_rank,),
            "self_attn.kv_b_proj.weight": (
                heads * (self.qk_nope_head_dim + self.v_head_dim),
                self.kv_lora_rank,
            ),
            "self_attn.o_proj.weight": (hidden, heads * self.v_head_dim),
        }
        if self.q_lora_rank is None:
            shapes["self_attn.q_proj.weight"] = (query, hidden)
        else:
            shapes |= {
                "self_attn.q_a_proj.weight": (self.q_lora_rank, hidden),
                "self_attn.q_a_layernorm.weight": (self.q_lora_rank,),
                "self_attn.q_b_proj.weight": (query, self.q_lora_rank),
            }
        if self.attention_bias:
            shapes |= {
                "self_attn.kv_a_proj_with_mqa.bias": (latent,),
                "self_attn.o_proj.bias": (hidden,),
            }
            if self.q_lora_rank is not None:
                shapes["self_attn.q_a_proj.bias"] = (self.q_lora_rank,)
        return shapes | self._ffn_shapes(moe=moe)

    def _ffn_shapes(self, *, moe: bool) -> Shapes:
        hidden = self.hidden_size
        if not moe:
            return mlp_shapes("mlp.", hidden, self.intermediate_size)
        width, experts = self.moe_intermediate_size, self.n_routed_experts
        shapes: Shapes = {
            "mlp.gate.weight": (experts, hidden),
            "mlp.gate.e_score_correction_bias": (experts,),
        }
        for expert in range(experts):
            shapes |= mlp_shapes(f"mlp.experts.{expert}.", hidden, width)
        return shapes | mlp_shapes("mlp.shared_experts.", hidden, width * self.n_shared_experts)


class TinyIndexed(sizes("indexed", TinyDeepseek)):
    """A tiny DeepSeek-V3.2 or GLM-5: DeepSeek-V3 with an indexer in every layer, or in those that
    are `full`. 16 heads of the indexer, because with fewer of them several scores of a token are
    exactly 0."""

    def config(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The content of config.json, but for the dtype and the quantisation."""
        entries = super().config(spelling)
        return {k: v for k, v in entries.items() if k != "indexer_types" or v}

    def shapes(self) -> Shapes:
        """Name in the checkpoint -> shape, [out, in] for projections."""
        kinds = enumerate(self.indexer_types)
        shared = tuple(f"model.layers.{n}.self_attn.indexer." for n, k in kinds if k == "shared")
        shapes: Shapes = super().shapes()
        return {name: shape for name, shape in shapes.items() if not name.startswith(shared)}

    def _layer_shapes(self, *, moe: bool) -> Shapes:
        heads, width, hidden = self.index_n_heads, self.index_head_dim, self.hidden_size
        matrices = {"wq_b": (heads * width, self.q_lora_rank or 0), "wk": (width, hidden)}
        matrices |= {"k_norm": (width,), "weights_proj": (heads, hidden)}
        shapes: Shapes = {f"{name}.weight": shape for name, shape in matrices.items()}
        shapes["k_norm.bias"] = (width,)
        return super()._layer_shapes(moe=moe) | prefixed("self_attn.indexer.", shapes)


class TinyQwen3(sizes("qwen3")):
    """The sizes of a tiny Qwen3, dense or with experts, named as in config.json."""

    def config(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The content of config.json, but for the dtype and the quantisation."""
        moe = self.model_type == "qwen3_moe"
        entries = {key: value for key, value in vars(self).items() if key not in _ROPE}
        entries |= _common("Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM")
        entries["mlp_only_layers"] = list(self.mlp_only_layers)
        if moe:
            entries |= {"output_router_logits": False, "router_aux_loss_coef": 0.001}
        else:
            for key in _ONLY_MOE:
                del entries[key]
        if spelling == "released":
            scaling = self.yarn and {"rope_type": "yarn", **self.yarn.entries()}
            return entries | {"rope_theta": self.rope_theta, "rope_scaling": scaling}
        entries |= {
            "rope_parameters": _rope_parameters(self.rope_theta, self.yarn),
            "pad_token_id": None,
        }
        if moe:
            entries["num_local_experts"] = entries.pop("num_experts")
            del entries["max_window_layers"]
        else:
            windowed = self.use_sliding_window
            entries["layer_types"] = [
                f"{'sliding' if windowed and layer >= self.max_window_layers else 'full'}_attention"
                for layer in range(self.num_hidden_layers)
            ]
        return entries

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return (
            self.model_type == "qwen3_moe"
            and layer not in self.mlp_only_layers
            and self.num_experts > 0
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def shapes(self) -> Shapes:
        """Name in the checkpoint -> shape, [out, in] for projections."""
        shapes = _outer_shapes(self.hidden_size, tied=self.tie_word_embeddings)
        for layer in range(self.num_hidden_layers):
            layer_shapes = self._layer_shapes(moe=self.is_moe(layer))
            shapes |= prefixed(f"model.layers.{layer}.", layer_shapes)
        return shapes

    def _layer_shapes(self, *, moe: bool) -> Shapes:
        hidden = self.hidden_size
        query, keys = (
            heads * self.head_dim for heads in (self.num_attention_heads, self.num_key_value_heads)
        )
        biased = "qkvo" if self.attention_bias else ""
        shapes = _grouped(hidden, query, keys, (self.head_dim, self.head_dim), biased)
        if not moe:
            return shapes | mlp_shapes("mlp.", hidden, self.intermediate_size)
        shapes["mlp.gate.weight"] = (self.num_experts, hidden)
        for expert in range(self.num_experts):
            shapes |= mlp_shapes(f"mlp.experts.{expert}.", hidden, self.moe_intermediate_size)
        return shapes


class TinyGlm4(sizes("glm4", TinyDeepseek)):
    """A tiny GLM-4.5: DeepSeek-V3's fields, but grouped-query attention."""

    def config(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The content of config.json, but for the dtype and the quantisation."""
        entries = {key: value for key, value in vars(self).items() if key not in (*_ROPE, *_LATENT)}
        entries |= _common("CausalLM")
        if spelling == "released":
            scaling = self.yarn and {"rope_type": "yarn", **self.yarn.entries()}
            return entries | {"rope_theta": self.rope_theta, "rope_scaling": scaling}
        share = {"partial_rotary_factor": entries.pop("partial_rotary_factor")}
        return entries | {"rope_parameters": _rope_parameters(self.rope_theta, self.yarn) | share}

    def _layer_shapes(self, *, moe: bool) -> Shapes:
        query, keys = (
            heads * self.head_dim for heads in (self.num_attention_heads, self.num_key_value_heads)
        )
        norms = (self.head_dim, self.head_dim) if self.use_qk_norm else None
        norms = (query, keys) if self.model_type == "minimax_m2" else norms
        biased = "qkv" if self.attention_bias else ""
        return _grouped(self.hidden_size, query, keys, norms, biased) | self._ffn_shapes(moe=moe)


class TinyMinimax(sizes("minimax", TinyGlm4)):
    """A tiny MiniMax-M2: the fields of GLM-4.5 that it has, which its files name otherwise."""

    def config(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The content of config.json, but for the dtype and the quantisation."""
        entries = super().config(spelling)
        for name in (
            *("attention_bias", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob"),
            *("routed_scaling_factor", "first_k_dense_replace", "num_nextn_predict_layers"),
        ):
            del entries[name]
        entries["num_local_experts"] = entries.pop("n_routed_experts")
        entries["intermediate_size"] = entries.pop("moe_intermediate_size")
        if spelling == "released":
            entries["rotary_dim"] = int(self.head_dim * entries.pop("partial_rotary_factor"))
            entries |= {"qk_norm_type": "per_layer", "num_mtp_modules": 3, "use_mtp": True}
        return entries

    def shapes(self) -> Shapes:
        """Name in the checkpoint -> shape, [out, in] for projections."""
        shapes = {n: s for n, s in super().shapes().items() if "shared_experts" not in n}
        for old, new in MINIMAX.items():
            shapes = {name.replace(old, new): shape for name, shape in shapes.items()}
        return shapes


class TinyStep3p5(sizes("step3p5")):
    """The sizes of a tiny Step-3.5-Flash, named as in config.json; every fourth layer has no
    window."""

    num_experts_per_tok = SIZES["step3p5"]["moe_top_k"]

    def config(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The content of config.json, but for the dtype and the quantisation."""
        sizes = vars(self) if spelling == "released" else {}
        entries = _common("Step3p5ForCausalLM") | sizes | ENTRIES[f"step3p5, {spelling}"]
        if self.model_type == "step3p5":
            return entries
        return {
            "model_type": self.model_type,
            "text_config": entries | {"model_type": "step3p5"},
            "vision_config": {"hidden_size": 4},
        }

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return str(layer) in self.moe_layers_enum.split(",")

    def shapes(self) -> Shapes:
        """Name in the checkpoint -> shape, [out, in] for projections."""
        hidden, last = self.hidden_size, self.num_hidden_layers
        shapes = _outer_shapes(hidden, tied=False)
        for layer in range(last + self.num_nextn_predict_layers):
            prefix = f"model.layers.{layer}."
            shapes |= prefixed(prefix, self._layer_shapes(6 if layer % 4 else 4, layer))
            if layer >= last:
                norms = dict.fromkeys(("enorm", "hnorm", "transformer.shared_head.norm"), (hidden,))
                maps = {"eh_proj": (hidden, 2 * hidden)}
                maps |= {"transformer.shared_head.output": (VOCAB, hidden)}
                shapes |= {f"{prefix}{name}.weight": size for name, size in (norms | maps).items()}
        return shapes

    def _layer_shapes(self, heads: int, layer: int) -> Shapes:
        hidden, dim = self.hidden_size, self.head_dim
        shapes = _grouped(hidden, heads * dim, self.num_attention_groups * dim, (dim, dim), "")
        shapes["self_attn.g_proj.weight"] = (heads, hidden)
        if not self.is_moe(layer):
            return shapes | mlp_shapes("mlp.", hidden, self.intermediate_size)
        experts, width = self.moe_num_experts, self.moe_intermediate_size
        shapes |= {"moe.gate.weight": (experts, hidden), "moe.router_bias": (experts,)}
        stacks = mlp_shapes("moe.", hidden, width)
        shapes |= {name: (experts, *size) for name, size in stacks.items()}
        return shapes | mlp_shapes("share_expert.", hidden, self.share_expert_dim)


class TinyGptOss(sizes("gpt_oss")):
    """The sizes of a tiny gpt-oss, named as in config.json; every other layer has a window.

    Its shapes are those of a folder that transformers writes: experts' matrices are floats
    [experts, in, out], and columns of gate and up take turns.
    """

    def config(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The content of config.json, but for the dtype and the quantisation."""
        kinds = ["full" if n % 2 else "sliding" for n in range(self.num_hidden_layers)]
        scaling = {"rope_type": "yarn", **Yarn(32.0).entries(), "truncate": False}
        entries = _common("GptOssForCausalLM") | vars(self) | {"attention_bias": True}
        entries["layer_types"] = [f"{kind}_attention" for kind in kinds]
        if spelling == "released":
            old = {"rope_theta": 150_000.0, "rope_scaling": scaling, "experts_per_token": 3}
            return entries | old | {"initial_context_length": 64}
        return entries | {
            "rope_parameters": {"rope_theta": 150_000.0, **scaling},
            "swiglu_alpha": 1.702,
        }

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return True

    def shapes(self) -> Shapes:
        """Name in the checkpoint -> shape."""
        hidden, width, dim = self.hidden_size, self.intermediate_size, self.head_dim
        query, keys = self.num_attention_heads * dim, self.num_key_value_heads * dim
        experts = self.num_local_experts
        layer = _grouped(hidden, query, keys, None, "qkvo") | {
            "self_attn.sinks": (self.num_attention_heads,),
            "mlp.router.weight": (experts, hidden),
            "mlp.router.bias": (experts,),
            "mlp.experts.gate_up_proj": (experts, hidden, 2 * width),
            "mlp.experts.gate_up_proj_bias": (experts, 2 * width),
            "mlp.experts.down_proj": (experts, width, hidden),
            "mlp.experts.down_proj_bias": (experts, hidden),
        }
        shapes = _outer_shapes(hidden, tied=False)
        for number in range(self.num_hidden_layers):
            shapes |= prefixed(f"model.layers.{number}.", layer)
        return shapes


MINIMAX = {"mlp.gate.e_score": "mlp.e_score", ".mlp.": ".block_sparse_moe."}
MINIMAX |= {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Parts of the names of tensors: GLM-4.5's -> MiniMax-M2's."""

_ROPE = ("rope_theta", "yarn")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LATENT += ("moe_layer_freq",)
_ONLY_MOE = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
_ONLY_MOE += ("decoder_sparse_step", "mlp_only_layers")


def _common(architecture: str) -> dict[str, Any]:
    """Entries that all models have, and that change nothing."""
    same = {"bos_token_id": BOS, "eos_token_id": EOS, "vocab_size": VOCAB}
    return {"architectures": [architecture], **same, **ENTRIES["common"]}


def _rope_parameters(theta: float, yarn: Yarn | None) -> dict[str, Any]:
    kind = {"rope_type": "yarn", **yarn.entries()} if yarn else {"rope_type": "default"}
    return {"rope_theta": theta, **kind}


def _grouped(
    hidden: int, query: int, keys: int, norms: tuple[int, int] | None, biased: str
) -> Shapes:
    """Norms and grouped-query attention of a layer."""
    attn, sizes = "self_attn.", {"q": query, "k": keys, "v": keys}
    shapes: Shapes = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes |= {f"{attn}{name}_proj.weight": (sizes[name], hidden) for name in "qkv"}
    shapes[f"{attn}o_proj.weight"] = (hidden, query)
    if norms:
        shapes |= {f"{attn}q_norm.weight": norms[:1], f"{attn}k_norm.weight": norms[1:]}
    return shapes | {f"{attn}{name}_proj.bias": (sizes.get(name, hidden),) for name in biased}


def _outer_shapes(hidden: int, *, tied: bool) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    return shapes if tied else shapes | {"lm_head.weight": (VOCAB, hidden)}


def mlp_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}
