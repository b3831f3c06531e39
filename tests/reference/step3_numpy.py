"""Step-3 in plain NumPy, written from the model's description alone.

Tests compare jaxserve with it. What it does not share with other decoders is here.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.decoder_numpy import (
    DecoderNumpy,
    RopeNumpy,
    attend,
    read_folder,
    silu,
    softmax,
)


class Step3Numpy(DecoderNumpy):
    """A Step-3 language model, with the multi-token-prediction module if the checkpoint has one.

    Args:
      config: the text model's entries of config.json.
      tensors: name in the checkpoint -> weights, [out, in] for projections.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray]):
        super().__init__(config, tensors)
        moe_layers = config["moe_layers_enum"]
        if isinstance(moe_layers, str):
            moe_layers = [part for part in moe_layers.split(",") if part.strip()]
        self.moe_layers = {int(layer) for layer in moe_layers}

    @classmethod
    def from_folder(cls, path: str | Path) -> "Step3Numpy":
        """Reads a Hugging Face folder: config.json and all *.safetensors files."""
        config, tensors = read_folder(Path(path))
        return cls(config.get("text_config", config), tensors)

    def mtp_logits(self, token_ids: list[int]) -> np.ndarray:
        """Output of the MTP module: row i sees the tokens 0..i+1 and predicts token i+2.

        Returns:
          [tokens - 1, vocab].
        """
        name = f"model.layers.{self.layers}"
        x = self.joined(self.layers, self.hidden(token_ids)[:-1], token_ids[1:])
        x = self.norm(f"{name}.shared_head.norm", self.decoder_layer(self.layers, x))
        own = f"{name}.shared_head.head.weight"
        return x @ self.tensors[own if own in self.tensors else "lm_head.weight"].T

    def decoder_layer(self, layer: int, x: np.ndarray) -> np.ndarray:
        name = f"model.layers.{layer}"
        x = x + self.attention(layer, self.norm(f"{name}.input_layernorm", x))
        normed = self.norm(f"{name}.post_attention_layernorm", x)
        if not self.is_moe(layer):
            return x + self.mlp(f"{name}.mlp", normed)
        return x + self.experts(f"{name}.moe", normed) + self.mlp(f"{name}.share_expert", normed)

    def is_moe(self, layer: int) -> bool:
        if layer == self.layers:  # the MTP module's layer, of which the config says nothing
            return f"model.layers.{layer}.moe.gate.weight" in self.tensors
        return layer in self.moe_layers

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Multi-matrix factorisation attention: a low-rank query, few keys and values."""
        name, tokens = f"model.layers.{layer}.self_attn", len(x)
        dim = self.config["head_dim"]
        latent = self.norm(f"{name}.inter_norm", self.linear(f"{name}.q_proj", x))
        query = self.linear(f"{name}.wq", latent).reshape(tokens, -1, dim)
        key, value = (
            self.linear(f"{name}.{part}_proj", x).reshape(tokens, -1, dim) for part in "kv"
        )
        rope = RopeNumpy(self.config, dim)
        query, key = (rope.turn(heads, interleaved=False) for heads in (query, key))
        output = attend(query, key, value, dim**-0.5, window=0)
        return self.linear(f"{name}.o_proj", output.reshape(tokens, -1))

    def choose(self, name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each token's experts and their weights, [tokens, top_k] both, the best expert first."""
        probabilities = softmax(self.linear(f"{name}.gate", x))
        chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, : self.config["moe_top_k"]]
        weights = np.take_along_axis(probabilities, chosen, axis=-1)
        if self.config.get("norm_expert_weight", False):
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return chosen, weights

    def experts(self, name: str, x: np.ndarray) -> np.ndarray:
        chosen, weights = self.choose(name, x)
        gate, up, down = (
            self.tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        output = np.zeros_like(x)
        for expert in np.unique(chosen):
            token, choice = np.nonzero(chosen == expert)
            rows = x[token]
            rows = (silu(rows @ gate[expert].T) * (rows @ up[expert].T)) @ down[expert].T
            output[token] += weights[token, choice, None] * rows
        return output
