"""Writes a second model to try clients with: Qwen3's shape, 8k of context, random weights.

    python launch/second_model.py build/second            its template calls tools
    python launch/second_model.py build/second --thinks   and begins answers with reasoning
    python -m jaxserve.serve --config build/second/serve.yaml

Its tokens are the demo's and the marks of Qwen3's chats. Unlike other random models it ends: the
first feature of the residual stream is constant, so the head's first column acts as a bias. It
makes ends of reasoning, of answers and of JSON strings likely, and ids without text impossible.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "configs" / "demo"
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens beside the demo's; the first two are special."""
FIRST = 3072
"""Id of the first mark."""
BIASES = {"<|im_end|>": 3.5, "</think>": 4.5, '"': 4.5}
"""Token → addition to its logit, whose standard deviation is 2."""
THINKING = (
    "{% if add_generation_prompt and (enable_thinking is not defined or enable_thinking) %}"
    "<think>\n{% endif %}{# </think> #}"
)
"""End of the template of a model that reasons unless `enable_thinking` is false."""
VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, D_FF = 8192, 64, 2, 4, 2, 16, 128
CONSTANT = 4.0
"""The residual stream's first feature."""


def write(folder: Path, *, thinks: bool = False) -> Path:
    """Writes the model and its deployment, `serve.yaml`, and returns the deployment's path."""
    folder.mkdir(parents=True, exist_ok=True)
    template = (HERE / "second_model.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template + (THINKING if thinks else ""))
    (folder / "config.json").write_text(json.dumps(_config()), encoding="utf-8")
    names = {"eos_token": MARKS[1], "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    tokens = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    kind = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ids = {mark: FIRST + place for place, mark in enumerate(MARKS)}
    tokens["added_tokens"] += [
        {"id": token_id, "content": mark, **kind, "special": token_id < FIRST + 2}
        for mark, token_id in ids.items()
    ]
    tokens["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    bias = np.where(np.arange(VOCAB) < FIRST + len(MARKS), 0.0, -100.0)
    for mark, added in BIASES.items():
        bias[(ids | tokens["model"]["vocab"])[mark]] = added
    save_file(_weights(bias), folder / "model.safetensors")
    return Path(shutil.copy(HERE / "second_model.yaml", folder / "serve.yaml"))


def _config() -> dict[str, object]:
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": D_FF}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    sizes |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 8192}
    named = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "float32"}
    values = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    return {**named, **sizes, **values, "eos_token_id": FIRST + 1}


def _weights(bias: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the model's tensors by name; `bias` [vocab] is added to its logits."""
    draw = np.random.default_rng(7)

    def normal(rows: int, columns: int, size: float = 1.0) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * size).astype(np.float32)

    embedding, head = normal(VOCAB, WIDTH), normal(VOCAB, WIDTH, 0.25)
    embedding[:, 0] = CONSTANT
    made = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(WIDTH, np.float32)}
    shapes = dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (KV_HEADS * HEAD_DIM, WIDTH))
    shapes |= {"self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH), "mlp.down_proj": (WIDTH, D_FF)}
    shapes |= {"self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM)}
    shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (D_FF, WIDTH))
    norms = {"input_layernorm": WIDTH, "post_attention_layernorm": WIDTH}
    norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            weight = made[f"{prefix}.{name}.weight"] = normal(*shape, shape[1] ** -0.5)
            if name.endswith(("o_proj", "down_proj")):
                weight[0] = 0.0  # leaves the first feature unchanged
        made |= {f"{prefix}.{name}.weight": np.ones(n, np.float32) for name, n in norms.items()}
    head -= 0.25 * embedding  # makes repeats of the last token unlikely
    # Divides by the first feature after the last norm, for rows of the usual length.
    head[:, 0] = bias * (1 + (CONSTANT**2 + WIDTH) / WIDTH) ** 0.5 / CONSTANT
    return {**made, "lm_head.weight": head}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--thinks", action="store_true", help="answers begin with reasoning")
    arguments = parser.parse_args()
    print(write(arguments.folder, thinks=arguments.thinks))
