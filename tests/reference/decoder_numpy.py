"""DeepSeek-V3 (and Kimi K2) and Qwen3 in plain NumPy, written from the models' descriptions.

For tests, where transformers is not installed; `step3_numpy.py` has Step-3. Shares no code with
jaxserve or with the writer of the tiny checkpoints, and does not know jax. Float64, one sequence at
a time, everything computed anew for every token: no cache could be wrong.
"""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import deserialize

DTYPES: dict[str, Any] = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": ml_dtypes.bfloat16}
DTYPES["F8_E4M3"] = ml_dtypes.float8_e4m3fn


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Reads a safetensors file as float64."""
    return {
        name: np.frombuffer(entry["data"], DTYPES[entry["dtype"]])
        .astype(np.float64)
        .reshape(entry["shape"])
        for name, entry in deserialize(path.read_bytes())
    }


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json, and the tensors of all *.safetensors files."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= read_safetensors(file)
    return json.loads((path / "config.json").read_text()), tensors


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def silu(x: np.ndarray) -> np.ndarray:
    return x * (0.5 * (1 + np.tanh(0.5 * x)))


def dequantise(tensors: dict[str, np.ndarray], block: list[int]) -> dict[str, np.ndarray]:
    """Multiplies every block of a weight by its scale, and leaves the scales out."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scales = tensors.get(f"{name}_scale_inv")
        if scales is not None:
            tensor = tensor.copy()
            for row, column in np.ndindex(scales.shape):
                rows = slice(row * block[0], (row + 1) * block[0])
                columns = slice(column * block[1], (column + 1) * block[1])
                tensor[rows, columns] *= scales[row, column]
        result[name] = tensor
    return result


class RopeNumpy:
    """Angles and factors of rotary embedding, with YaRN where the config asks for it."""

    def __init__(self, config: dict[str, Any], dim: int):
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = float(scaling.get("rope_theta") or config["rope_theta"])
        pairs = np.arange(dim // 2)
        self.frequencies = theta ** (-2.0 * pairs / dim)
        self.magnitude = 1.0
        """Factor of cosine and sine."""
        self.score_factor = 1.0
        """DeepSeek's factor of the attention scores."""
        if scaling.get("rope_type", scaling.get("type", "default")) != "yarn":
            return
        factor = float(scaling["factor"])
        low, high = (
            dim
            * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * rotations))
            / (2 * math.log(theta))
            for rotations in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
        )
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = np.clip((pairs - low) / (high - low or 0.001), 0, 1)
        self.frequencies *= ramp / factor + 1 - ramp
        above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if above and below:
            self.magnitude = yarn_magnitude(factor, above) / yarn_magnitude(factor, below)
        else:
            self.magnitude = yarn_magnitude(factor, 1.0)
        if below:
            self.score_factor = yarn_magnitude(factor, below) ** 2

    def turn(self, x: np.ndarray, *, interleaved: bool) -> np.ndarray:
        """Turns pairs of the first `dim` columns of x [tokens, heads, columns]: neighbours, or
        element i with i + dim / 2."""
        angles = np.arange(len(x))[:, None, None] * self.frequencies
        cosine, sine = (self.magnitude * wave(angles) for wave in (np.cos, np.sin))
        half = len(self.frequencies)
        first, second = slice(half), slice(half, 2 * half)
        if interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        turned = x.copy()
        turned[..., first] = x[..., first] * cosine - x[..., second] * sine
        turned[..., second] = x[..., second] * cosine + x[..., first] * sine
        return turned


def yarn_magnitude(factor: float, mscale: float) -> float:
    """0.1 · mscale · ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    window: int,
    sinks: np.ndarray | None = None,
    shown: Any = True,
) -> np.ndarray:
    """Causal attention, [tokens, heads, dim] each; key and value heads serve equal shares.

    A token sees itself and `window - 1` tokens before it; all of them if the window is 0; and only
    those `shown` to it, [tokens, tokens]. A head's sink is one more score, of a value that is zero.
    """
    tokens, heads, _ = query.shape
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    visible = (distance >= 0) & ((distance < window) if window else True) & shown
    output = np.empty((tokens, heads, value.shape[-1]))
    for head in range(heads):
        group = head * key.shape[1] // heads
        scores = query[:, head] @ key[:, group].T * scale
        scores = np.where(visible, scores, -np.inf)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((tokens, 1), sinks[head])], axis=1)
        output[:, head] = softmax(scores)[:, :tokens] @ value[:, group]
    return output


class DecoderNumpy:
    """Decoder common to both families, which define `attention`, `is_moe` and `route`."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray]):
        self.config, self.tensors = config, tensors
        self.layers = int(config.get("num_hidden_layers", 0))

    @staticmethod
    def from_folder(path: str | Path) -> "DecoderNumpy":
        """Reads a Hugging Face folder of one of the families."""
        config, tensors = read_folder(Path(path))
        if config.get("quantization_config"):
            tensors = dequantise(tensors, config["quantization_config"]["weight_block_size"])
        kinds = {"deepseek_v3": DeepseekNumpy, "kimi_k2": DeepseekNumpy}
        kinds |= {"deepseek_v32": DeepseekNumpy, "glm_moe_dsa": DeepseekNumpy}
        kinds |= {"glm4_moe": Glm4Numpy, "minimax_m2": MinimaxNumpy}
        kinds |= {"step3p5": Step3p5Numpy, "step3p7": Step3p5Numpy, "gpt_oss": GptOssNumpy}
        return kinds.get(config["model_type"], Qwen3Numpy)(config, tensors)

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """After every token of one sequence, [tokens, vocab]."""
        return self.head(self.hidden(token_ids))

    def hidden(self, token_ids: list[int]) -> np.ndarray:
        """The outputs of the final norm, [tokens, d_model]."""
        return self.norm("model.norm", self.stream(token_ids))

    def stream(self, token_ids: list[int]) -> np.ndarray:
        """The residual stream behind the last layer, [tokens, d_model]."""
        x = self.tensors["model.embed_tokens.weight"][np.asarray(token_ids)]
        for layer in range(self.layers):
            x = self.decoder_layer(layer, x)
        return x

    def joined(self, layer: int, hidden: np.ndarray, following: list[int]) -> np.ndarray:
        """The input of a prediction module: the tokens that follow, and the rows before them."""
        name = f"model.layers.{layer}."
        table = self.tensors["model.embed_tokens.weight"]
        embedding = self.tensors.get(f"{name}embed_tokens.weight", table)[following]
        parts = self.norm(f"{name}enorm", embedding), self.norm(f"{name}hnorm", hidden)
        return self.linear(f"{name}eh_proj", np.concatenate(parts, axis=-1))

    def head(self, hidden: np.ndarray) -> np.ndarray:
        tied = self.config.get("tie_word_embeddings", False)
        return self.linear("model.embed_tokens" if tied else "lm_head", hidden)

    def decoder_layer(self, layer: int, x: np.ndarray) -> np.ndarray:
        name = f"model.layers.{layer}."
        x = x + self.attention(layer, self.norm(f"{name}input_layernorm", x))
        normed = self.norm(f"{name}post_attention_layernorm", x)
        return x + (self.experts if self.is_moe(layer) else self.mlp)(f"{name}mlp", normed)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` tokens that follow the prompt."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(prompt) :]

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def is_moe(self, layer: int) -> bool:
        raise NotImplementedError

    def route(self, name: str, x: np.ndarray) -> np.ndarray:
        """Every expert's weight for every token, [tokens, experts]; 0 for those not chosen."""
        raise NotImplementedError

    def experts(self, name: str, x: np.ndarray) -> np.ndarray:
        weights = self.route(f"{name}.gate", x)
        output = np.zeros_like(x)
        for expert in range(weights.shape[1]):
            output += weights[:, expert, None] * self.mlp(f"{name}.experts.{expert}", x)
        if f"{name}.shared_experts.up_proj.weight" in self.tensors:
            output += self.mlp(f"{name}.shared_experts", x)
        return output

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gated = silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: np.ndarray, epsilon: float | None = None) -> np.ndarray:
        if epsilon is None:
            epsilon = self.config["rms_norm_eps"]
        return rms_norm(x, self.tensors[f"{name}.weight"], epsilon)


def keep_best(scores: np.ndarray, count: int) -> np.ndarray:
    """True for the `count` best of every row."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    best = np.zeros(scores.shape, bool)
    np.put_along_axis(best, order[:, :count], True, axis=-1)
    return best


class DeepseekNumpy(DecoderNumpy):
    """Latent attention, and experts chosen by biased sigmoid scores within the best groups."""

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        config, name, tokens = self.config, f"model.layers.{layer}.self_attn.", len(x)
        shown: Any = True
        heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
        plain, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        rope = RopeNumpy(config, turned)
        if config["q_lora_rank"] is None:
            query = self.linear(f"{name}q_proj", x)
        else:
            low_rank = self.norm(f"{name}q_a_layernorm", self.linear(f"{name}q_a_proj", x), 1e-6)
            query = self.linear(f"{name}q_b_proj", low_rank)
        query = query.reshape(tokens, heads, plain + turned)
        shared = self.linear(f"{name}kv_a_proj_with_mqa", x)
        compressed = self.norm(f"{name}kv_a_layernorm", shared[:, :latent], 1e-6)
        expanded = self.linear(f"{name}kv_b_proj", compressed).reshape(tokens, heads, -1)
        key_turned = rope.turn(shared[:, None, latent:], interleaved=True)
        key = np.concatenate(
            [expanded[..., :plain], np.broadcast_to(key_turned, (tokens, heads, turned))], axis=-1
        )
        query = np.concatenate(
            [query[..., :plain], rope.turn(query[..., plain:], interleaved=True)], axis=-1
        )
        scale = rope.score_factor / math.sqrt(plain + turned)
        if "index_topk" in config:
            kinds = config.get("indexer_types") or ["full"] * (layer + 1)
            if kinds[layer] == "full":
                self.shown = self.chosen(f"{name}indexer.", x, low_rank, rope)
            shown = self.shown  # by the last layer with an indexer
        output = attend(query, key, expanded[..., plain:], scale, 0, shown=shown)
        return self.linear(f"{name}o_proj", output.reshape(tokens, -1))

    def chosen(self, name: str, x: np.ndarray, low: np.ndarray, rope: "RopeNumpy") -> np.ndarray:
        """The tokens that an indexer lets each token see, bool [tokens, tokens]: the best, of equal
        ones the first."""
        config, tokens = self.config, len(x)
        pairs = config["model_type"] == "glm_moe_dsa"

        query = self.linear(f"{name}wq_b", low).reshape(tokens, config["index_n_heads"], -1)
        query = rope.turn(query, interleaved=pairs)
        key = self.linear(f"{name}wk", x)
        key = (key - key.mean(-1, keepdims=True)) / np.sqrt(key.var(-1, keepdims=True) + 1e-6)
        key *= self.tensors[f"{name}k_norm.weight"]
        key = (key + self.tensors[f"{name}k_norm.bias"])[:, None]
        key = rope.turn(key, interleaved=pairs)[:, 0]
        weights = self.linear(f"{name}weights_proj", x) / math.sqrt(query[0].size)
        scores = np.einsum("thd,sd->ths", query, key)
        scores = np.einsum("th,ths->ts", weights, np.maximum(scores, 0))
        seen = np.tril(np.ones((tokens, tokens), bool))
        return keep_best(np.where(seen, scores, -np.inf), config["index_topk"])

    def is_moe(self, layer: int) -> bool:
        first, every = self.config["first_k_dense_replace"], self.config.get("moe_layer_freq", 1)
        return layer >= first and layer % every == 0

    def route(self, name: str, x: np.ndarray) -> np.ndarray:
        config = self.config
        scores = 1 / (1 + np.exp(-self.linear(name, x)))
        biased = scores + self.tensors[f"{name}.e_score_correction_bias"]
        groups = biased.reshape(len(x), config["n_group"], -1)
        best_two = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
        kept = keep_best(best_two, config["topk_group"])
        allowed = np.where(kept[..., None], groups, -np.inf).reshape(biased.shape)
        weights = np.where(keep_best(allowed, config["num_experts_per_tok"]), scores, 0)
        if config["norm_topk_prob"]:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return weights * config["routed_scaling_factor"]


class Qwen3Numpy(DecoderNumpy):
    """Grouped-query attention with normalised heads, and experts chosen by softmax."""

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        config, name, tokens = self.config, f"model.layers.{layer}.self_attn.", len(x)
        dim, rope = config["head_dim"], RopeNumpy(config, self.rotated())

        def heads(kind: str) -> np.ndarray:
            made, norm = self.linear(f"{name}{kind}_proj", x), f"{name}{kind}_norm"
            if f"{norm}.weight" in self.tensors:
                width = self.tensors[f"{norm}.weight"].size  # of a head, or of all
                made = self.norm(norm, made.reshape(tokens, -1, width))
            return made.reshape(tokens, -1, dim)

        query, key = (rope.turn(heads(kind), interleaved=False) for kind in "qk")
        output = attend(query, key, heads("v"), dim**-0.5, self.window(layer))
        return self.linear(f"{name}o_proj", output.reshape(tokens, -1))

    def rotated(self) -> int:
        """Columns of a head that RoPE turns."""
        config, dim = self.config, self.config["head_dim"]
        share = config.get("rope_parameters", config).get("partial_rotary_factor", 1)
        return config.get("rotary_dim") or int(dim * share)

    def window(self, layer: int) -> int:
        config = self.config
        if not config.get("use_sliding_window"):
            return 0
        dense = config["model_type"] == "qwen3"
        return 0 if dense and layer < config["max_window_layers"] else config["sliding_window"]

    def is_moe(self, layer: int) -> bool:
        config = self.config
        return (
            config["model_type"] == "qwen3_moe"
            and layer not in config["mlp_only_layers"]
            and (layer + 1) % config["decoder_sparse_step"] == 0
        )

    def route(self, name: str, x: np.ndarray) -> np.ndarray:
        probabilities = softmax(self.linear(name, x))
        chosen = keep_best(probabilities, self.config["num_experts_per_tok"])
        weights = np.where(chosen, probabilities, 0)
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights


class Glm4Numpy(Qwen3Numpy):
    """Grouped-query attention, and DeepSeek's experts."""

    is_moe, route = DeepseekNumpy.is_moe, DeepseekNumpy.route


class MinimaxNumpy(Glm4Numpy):
    """The same under other names, with experts in every layer."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray]):
        names = {"block_sparse_moe": "mlp", "mlp.e_score": "mlp.gate.e_score"}
        for old, new in (names | {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}).items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        fixed = {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
        super().__init__(config | fixed | {"routed_scaling_factor": 1.0}, tensors)


class Step3p5Numpy(DecoderNumpy):
    """Heads, angles and windows by layer, gates of heads, bounded SwiGLU, and norms of 1 + w."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray]):
        tensors = {n: t + 1 if n.endswith("norm.weight") else t for n, t in tensors.items()}
        super().__init__(config.get("text_config", config), tensors)

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        config, name, tokens = self.config, f"model.layers.{layer}.self_attn.", len(x)
        full, dim = config["layer_types"][layer] == "full_attention", config["head_dim"]
        columns = int(dim * config["partial_rotary_factors"][layer])
        rope = RopeNumpy({"rope_theta": config["rope_theta"][layer]}, columns)
        if full:
            scaling = config["rope_scaling"]
            turns = scaling["original_max_position_embeddings"] * rope.frequencies / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = np.clip((turns - low) / (high - low), 0, 1)
            rope.frequencies *= kept + (1 - kept) / scaling["factor"]

        def turned(kind: str) -> np.ndarray:
            heads = self.linear(f"{name}{kind}_proj", x).reshape(tokens, -1, dim)
            return rope.turn(self.norm(f"{name}{kind}_norm", heads), interleaved=False)

        value = self.linear(f"{name}v_proj", x).reshape(tokens, -1, dim)
        window = 0 if full else config["sliding_window"]
        output = attend(turned("q"), turned("k"), value, dim**-0.5, window)
        gates = 1 / (1 + np.exp(-self.linear(f"{name}g_proj", x)))
        return self.linear(f"{name}o_proj", (output * gates[..., None]).reshape(tokens, -1))

    def is_moe(self, layer: int) -> bool:
        return str(layer) in self.config["moe_layers_enum"].split(",")

    def mlp(self, name: str, x: np.ndarray, limits: str = "swiglu_limits_shared") -> np.ndarray:
        limit = self.config[limits][int(name.split(".")[2])] or np.inf
        gate = np.minimum(silu(self.linear(f"{name}.gate_proj", x)), limit)
        up = np.clip(self.linear(f"{name}.up_proj", x), -limit, limit)
        return self.linear(f"{name}.down_proj", gate * up)

    def experts(self, name: str, x: np.ndarray) -> np.ndarray:
        config, moe = self.config, name.replace(".mlp", ".moe")
        scores = 1 / (1 + np.exp(-self.linear(f"{moe}.gate", x)))
        chosen = keep_best(scores + self.tensors[f"{moe}.router_bias"], config["moe_top_k"])
        weights = np.where(chosen, scores, 0)
        weights *= config["moe_router_scaling_factor"] / weights.sum(axis=-1, keepdims=True)
        output = self.mlp(name.replace(".mlp", ".share_expert"), x)
        stacks = [self.tensors[f"{moe}.{part}_proj.weight"] for part in ("gate", "up", "down")]
        for expert, matrices in enumerate(zip(*stacks, strict=True)):
            for part, matrix in zip(("gate", "up", "down"), matrices, strict=True):
                self.tensors[f"{moe}.one.{part}_proj.weight"] = matrix
            output += weights[:, expert, None] * self.mlp(f"{moe}.one", x, "swiglu_limits")
        return output


class GptOssNumpy(Qwen3Numpy):
    """Windows in turns, sinks, and experts with biases; of files that transformers writes."""

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        config, name = self.config, f"model.layers.{layer}.self_attn."
        dim = config["head_dim"]
        query, key, value = (
            self.linear(f"{name}{kind}_proj", x).reshape(len(x), -1, dim) for kind in "qkv"
        )
        rope = RopeNumpy(config, dim)
        query, key = (rope.turn(heads, interleaved=False) for heads in (query, key))
        window = 0 if config["layer_types"][layer] == "full_attention" else config["sliding_window"]
        sinks = self.tensors[f"{name}sinks"]
        output = attend(query, key, value, dim**-0.5, window, sinks)
        return self.linear(f"{name}o_proj", output.reshape(len(x), -1))

    def is_moe(self, layer: int) -> bool:
        return True

    def experts(self, name: str, x: np.ndarray) -> np.ndarray:
        config, tensors, limit = self.config, self.tensors, self.config["swiglu_limit"]
        logits = self.linear(f"{name}.router", x)
        chosen = keep_best(logits, config["num_experts_per_tok"])
        weights, output = softmax(np.where(chosen, logits, -np.inf)), np.zeros_like(x)
        stacks = [
            tensors[f"{name}.experts.{part}_proj{bias}"]
            for part in ("gate_up", "down")
            for bias in ("", "_bias")
        ]
        for expert, (both, bias, down, down_bias) in enumerate(zip(*stacks, strict=True)):
            made = x @ both + bias
            gate, up = np.minimum(made[:, ::2], limit), np.clip(made[:, 1::2], -limit, limit)
            hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            output += weights[:, expert, None] * (hidden @ down + down_bias)
        return output
