"""Step-3 in plain NumPy, written from the model's description alone.

Tests compare jaxserve with it. It shares no code with jaxserve or with the writer of test
checkpoints, and knows neither jax nor safetensors. Everything is computed in one precision, float64
unless told otherwise, one sequence at a time.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


def read_safetensors(path: Path, dtype: type = np.float64) -> dict[str, np.ndarray]:
    """Read a safetensors file: 8 bytes of header length, a JSON header, the data."""
    data: bytes = Path(path).read_bytes()
    header_length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_length])
    header.pop("__metadata__", None)
    tensors: dict[str, np.ndarray] = {}
    for name, entry in header.items():
        begin, end = (8 + header_length + offset for offset in entry["data_offsets"])
        flat = decode(data[begin:end], entry["dtype"]).astype(dtype)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def decode(data: bytes, dtype: str) -> np.ndarray:
    """Decode the bytes of a tensor; a bfloat16 is the upper half of a float32.

    e4m3fn has one sign, four exponent and three mantissa bits, and no infinities.
    """
    if dtype == "F8_E4M3":
        bits = np.frombuffer(data, np.uint8).astype(np.int64)
        exponent, mantissa = bits >> 3 & 15, bits & 7
        normal = (8 + mantissa) * 2.0 ** (exponent - 10)
        values = np.where(exponent == 0, mantissa * 2.0**-9, normal)
        values = np.where(bits & 127 == 127, np.nan, values)
        return np.where(bits & 128, -values, values)
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype])


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def silu(x: np.ndarray) -> np.ndarray:
    return x * (0.5 * (1 + np.tanh(0.5 * x)))


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """RoPE on x [tokens, heads, head_dim]: element i turns with element i + head_dim / 2."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    angles = positions[:, None, None] * frequencies  # [tokens, 1, half]
    cosine, sine = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


@dataclass
class Cache:
    """Keys and values of the tokens seen, [tokens, groups, head_dim] for every layer."""

    keys: dict[int, np.ndarray] = field(default_factory=dict)
    values: dict[int, np.ndarray] = field(default_factory=dict)
    length: int = 0


class Step3Numpy:
    """A Step-3 language model, with the multi-token-prediction module if the checkpoint has one.

    Args:
      config: the text model's entries of config.json.
      tensors: name in the checkpoint -> weights, [out, in] for projections.
    """

    def __init__(self, config: dict, tensors: dict[str, np.ndarray]):
        self.tensors = tensors
        self.layers = int(config["num_hidden_layers"])
        self.heads = int(config["num_attention_heads"])
        self.groups = int(config.get("num_attention_groups", 1))
        self.head_dim = int(config["head_dim"])
        self.top_k = int(config["moe_top_k"])
        self.normalise_gates = bool(config.get("norm_expert_weight", False))
        self.epsilon = float(config["rms_norm_eps"])
        rope = config.get("rope_parameters") or {}
        self.theta = float(rope.get("rope_theta") or config["rope_theta"])
        if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
            raise NotImplementedError("RoPE scaling")
        moe_layers = config["moe_layers_enum"]
        if isinstance(moe_layers, str):
            moe_layers = [part for part in moe_layers.split(",") if part.strip()]
        self.moe_layers = {int(layer) for layer in moe_layers}

    @classmethod
    def from_folder(cls, path: str | Path, dtype: type = np.float64) -> "Step3Numpy":
        """Read a Hugging Face folder: config.json and all *.safetensors files."""
        config = json.loads((Path(path) / "config.json").read_text())
        tensors: dict[str, np.ndarray] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            tensors |= read_safetensors(file, dtype)
        return cls(config.get("text_config", config), tensors)

    @property
    def has_mtp(self) -> bool:
        return f"model.layers.{self.layers}.eh_proj.weight" in self.tensors

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """The logits after every token of one sequence, [tokens, vocab]."""
        return self.head(self.hidden(token_ids))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` tokens that follow the prompt, each the most probable one."""
        return self.greedy_with_margins(prompt, count)[0]

    def greedy_with_margins(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """As `greedy`; and how far each token's logit lies above the second best one."""
        cache, tokens, margins = Cache(), [], []
        unseen = list(prompt)
        for _ in range(count):
            logits = self.head(self.hidden(unseen, cache)[-1])
            second, best = np.argsort(logits, kind="stable")[-2:]
            tokens.append(int(np.argmax(logits)))
            margins.append(float(logits[best] - logits[second]))
            unseen = [tokens[-1]]
        return tokens, margins

    def mtp_logits(self, token_ids: list[int], *, first_position: int = 0) -> np.ndarray:
        """What the MTP module says: row i sees the tokens 0..i+1 and predicts token i+2.

        Returns:
          [tokens - 1, vocab].
        """
        hidden = self.hidden(token_ids)[:-1]
        name = f"model.layers.{self.layers}"
        own = f"{name}.embed_tokens.weight"
        embedding = self.tensors[own if own in self.tensors else "model.embed_tokens.weight"]
        x = np.concatenate(
            [
                self.norm(f"{name}.enorm", embedding[token_ids[1:]]),
                self.norm(f"{name}.hnorm", hidden),
            ],
            axis=-1,
        )
        x = self.linear(f"{name}.eh_proj", x)
        x = self.decoder_layer(self.layers, x, Cache(length=first_position))
        x = self.norm(f"{name}.shared_head.norm", x)
        own = f"{name}.shared_head.head.weight"
        return x @ self.tensors[own if own in self.tensors else "lm_head.weight"].T

    def hidden(self, token_ids: list[int], cache: Cache | None = None) -> np.ndarray:
        """The outputs of the final norm for these further tokens, [tokens, d_model]."""
        cache = cache or Cache()
        x = self.tensors["model.embed_tokens.weight"][np.asarray(token_ids, dtype=np.int64)]
        for layer in range(self.layers):
            x = self.decoder_layer(layer, x, cache)
        cache.length += len(token_ids)
        return self.norm("model.norm", x)

    def head(self, hidden: np.ndarray) -> np.ndarray:
        return self.linear("lm_head", hidden)

    def decoder_layer(self, layer: int, x: np.ndarray, cache: Cache | None = None) -> np.ndarray:
        name = f"model.layers.{layer}"
        normed = self.norm(f"{name}.input_layernorm", x)
        x = x + self.attention(layer, normed, cache or Cache())
        normed = self.norm(f"{name}.post_attention_layernorm", x)
        if self.is_moe(layer):
            return (
                x + self.experts(f"{name}.moe", normed) + self.mlp(f"{name}.share_expert", normed)
            )
        return x + self.mlp(f"{name}.mlp", normed)

    def is_moe(self, layer: int) -> bool:
        if layer == self.layers:  # the MTP module's layer, of which the config says nothing
            return f"model.layers.{layer}.moe.gate.weight" in self.tensors
        return layer in self.moe_layers

    def attention(self, layer: int, x: np.ndarray, cache: Cache) -> np.ndarray:
        """Multi-matrix factorisation attention: a low-rank query, few keys and values."""
        name = f"model.layers.{layer}.self_attn"
        tokens = x.shape[0]
        positions = cache.length + np.arange(tokens)
        latent = self.norm(f"{name}.inter_norm", self.linear(f"{name}.q_proj", x))
        query = self.linear(f"{name}.wq", latent).reshape(tokens, self.heads, self.head_dim)
        key = self.linear(f"{name}.k_proj", x).reshape(tokens, self.groups, self.head_dim)
        value = self.linear(f"{name}.v_proj", x).reshape(tokens, self.groups, self.head_dim)
        query = rotate(query, positions, self.theta)
        key = rotate(key, positions, self.theta)
        if layer in cache.keys:
            key = np.concatenate([cache.keys[layer], key])
            value = np.concatenate([cache.values[layer], value])
        cache.keys[layer], cache.values[layer] = key, value

        earlier = key.shape[0] - tokens
        visible = np.tri(tokens, key.shape[0], earlier, dtype=bool)
        output = np.empty_like(query)
        for head in range(self.heads):
            group = head // (self.heads // self.groups)
            scores = query[:, head] @ key[:, group].T / np.sqrt(self.head_dim).astype(x.dtype)
            output[:, head] = softmax(np.where(visible, scores, -np.inf)) @ value[:, group]
        return self.linear(f"{name}.o_proj", output.reshape(tokens, -1))

    def route(self, name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each token's experts and their weights, [tokens, top_k] both, the best expert first."""
        probabilities = softmax(self.linear(f"{name}.gate", x))
        chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, : self.top_k]
        weights = np.take_along_axis(probabilities, chosen, axis=-1)
        if self.normalise_gates:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return chosen, weights

    def experts(self, name: str, x: np.ndarray) -> np.ndarray:
        chosen, weights = self.route(name, x)
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

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gated = silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.epsilon)
