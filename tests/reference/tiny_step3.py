"""Writes tiny random Step-3 checkpoints for tests, in Hugging Face layout.

The weights are large enough for the routing to spread and the norms to matter: what a library draws
at initialisation would hide a wrong router or a forgotten norm.
"""

import json
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from tests.reference.tiny_models import with_copies, write_safetensors
from tests.reference.tiny_sizes import ENTRIES, Shapes, mlp_shapes, prefixed, sizes


class TinyStep3(sizes("step3")):
    """The sizes of a tiny model, named as in config.json where Step-3 has a name for them."""

    def config(
        self,
        *,
        dtype: str = "float32",
        vision: bool = False,
        moe_layers_as: type[str] | type[list] = str,
    ) -> dict:
        """The content of config.json.

        Args:
          dtype: what `torch_dtype` says.
          vision: the `step3_vl` form, with the language model's entries under `text_config`.
          moe_layers_as: `moe_layers_enum` as a comma string or as a list.
        """
        layers = list(self.moe_layers)
        named_otherwise = ("moe_layers", "mtp", "mtp_repeats_head")
        sizes = {name: size for name, size in vars(self).items() if name not in named_otherwise}
        text = sizes | ENTRIES["step3_text"] | {"torch_dtype": dtype}
        text["moe_layers_enum"] = ",".join(map(str, layers)) if moe_layers_as is str else layers
        if self.mtp:
            text["num_nextn_predict_layers"] = 1
        if not vision:
            return text
        image = {"image_token_id": self.vocab_size - 1, "torch_dtype": dtype}
        return ENTRIES["step3_vl"] | {"text_config": text} | image

    def shapes(self) -> Shapes:
        """Name in the checkpoint -> shape, [out, in] for projections."""
        shapes: Shapes = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
            "lm_head.weight": (self.vocab_size, self.hidden_size),
        }
        for layer in range(self.num_hidden_layers):
            shapes |= self._layer_shapes(layer, moe=layer in self.moe_layers)
        if self.mtp:
            name = f"model.layers.{self.num_hidden_layers}"
            shapes |= self._layer_shapes(self.num_hidden_layers, moe=True)
            shapes |= {
                f"{name}.enorm.weight": (self.hidden_size,),
                f"{name}.hnorm.weight": (self.hidden_size,),
                f"{name}.eh_proj.weight": (self.hidden_size, 2 * self.hidden_size),
                f"{name}.shared_head.norm.weight": (self.hidden_size,),
            }
            if self.mtp_repeats_head:
                shapes[f"{name}.embed_tokens.weight"] = shapes["model.embed_tokens.weight"]
                shapes[f"{name}.shared_head.head.weight"] = shapes["lm_head.weight"]
        return shapes

    def _layer_shapes(self, layer: int, *, moe: bool) -> Shapes:
        hidden = self.hidden_size
        heads = self.num_attention_heads * self.head_dim
        shapes: Shapes = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (self.share_q_dim, hidden),
            "self_attn.k_proj.weight": (self.head_dim, hidden),
            "self_attn.v_proj.weight": (self.head_dim, hidden),
            "self_attn.inter_norm.weight": (self.share_q_dim,),
            "self_attn.wq.weight": (heads, self.share_q_dim),
            "self_attn.o_proj.weight": (hidden, heads),
        }
        if moe:
            experts = self.moe_num_experts
            stacks = mlp_shapes("moe.", hidden, self.moe_intermediate_size)
            shapes["moe.gate.weight"] = (experts, hidden)
            shapes |= {name: (experts, *size) for name, size in stacks.items()}
            shapes |= mlp_shapes("share_expert.", hidden, self.share_expert_dim)
        else:
            shapes |= mlp_shapes("mlp.", hidden, self.intermediate_size)
        return prefixed(f"model.layers.{layer}.", shapes)

    def tensors(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Random float32 weights: norms 1 ± 0.2, all else with a standard deviation of 0.15."""
        rng = np.random.default_rng(seed)
        tensors = {}
        for name, shape in self.shapes().items():
            if len(shape) == 1:
                tensor = rng.uniform(0.8, 1.2, shape)
            else:
                tensor = rng.normal(scale=0.15, size=shape)
            tensors[name] = tensor.astype(np.float32)
        return with_copies(tensors)


def write_tiny_step3(
    folder: str | Path,
    sizes: TinyStep3 | None = None,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seed: int = 0,
    vision: bool = False,
    moe_layers_as: type[str] | type[list] = str,
    shards: int = 1,
) -> Path:
    """Write config.json and the safetensors files of a tiny random model; returns the folder.

    Args:
      folder: is created if it does not exist.
      sizes: TinyStep3() if None.
      dtype: of the file's tensors.
      seed: of the weights.
      vision: write the `step3_vl` form, with tensors of a vision model that a reader has to skip.
      moe_layers_as: write `moe_layers_enum` as a comma string or as a list.
      shards: the number of files; if more than one, there is a `model.safetensors.index.json` too.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = sizes or TinyStep3()
    config = sizes.config(dtype=dtype, vision=vision, moe_layers_as=moe_layers_as)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = sizes.tensors(seed)
    if vision:
        tensors["vision_model.embeddings.class_embedding"] = np.ones(8, np.float32)
        tensors["vit_downsampler.weight"] = np.ones((8, 8), np.float32)
    if dtype == "bfloat16":
        tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    write_safetensors(folder, tensors, shards)
    return folder
