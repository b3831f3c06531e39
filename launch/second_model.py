"""Writes a second model to try clients with: Qwen3's shape, 8k of context, random weights.

    python launch/second_model.py build/second            its template calls tools
    python launch/second_model.py build/second --thinks   and begins answers with reasoning
    python -m jaxserve.serve --config build/second/serve.yaml

Its tokens are the demo's and the marks of Qwen3's chats. Unlike other random models it ends: the
first feature of the residual stream is constant, so the head's first column acts as a bias. It
makes ends of reasoning, of answers and of JSON strings likely, digits beyond a number's first
unlikely, and ids without text impossible.
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
BIASES = {"<|im_end|>": 9.0, "</think>": 12.0, '"': 7.0, "}": 7.0}
"""Token → addition to its logit, whose standard deviation is 2 and whose maximum is about 7."""
DIGITS = -10.0
"""Addition to the logits of digits, so that a number of a forced call ends where it may."""
APART = {"<|im_end|>": ("\n", "\n\n", "</think>"), "</think>": ("\n",)}
"""Token → tokens that it hardly follows, so that neither reasoning nor answers are empty."""
CONFIG = json.loads((HERE / "second_model.json").read_text(encoding="utf-8"))
VOCAB, WIDTH, HEAD_DIM = (CONFIG[name] for name in ("vocab_size", "hidden_size", "head_dim"))
CONSTANT = 4.0
"""The residual stream's first feature; the second one, of </think>."""
LENGTH = (2 + CONSTANT**2 / WIDTH) ** 0.5
"""Usual length of a row before the last norm, over that of ones."""
CLOSED = 25.0
"""Subtracted from the logit of a reasoning model's end until </think> came."""


def write(folder: Path, *, thinks: bool = False) -> Path:
    """Writes the model and its deployment, `serve.yaml`, and returns the deployment's path."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = ("second_model.jinja", "second_model_thinking.jinja")[: 1 + thinks]
    template = "".join((HERE / part).read_text(encoding="utf-8") for part in parts)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    shutil.copy(HERE / "second_model.json", folder / "config.json")
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
    ids |= tokens["model"]["vocab"]
    ids |= {"\n" * n: ids["\u010a" * n] for n in (1, 2)}  # byte-level tokenizers spell them so
    bias = np.where(np.arange(VOCAB) < FIRST + len(MARKS), 0.0, -100.0)
    for mark, added in BIASES.items():
        bias[ids[mark]] = added if thinks or mark != "</think>" else -added
    bias[[ids[one] for one in ids if one.lstrip("\u0120").isdecimal()]] = DIGITS
    apart = {ids[mark]: [ids[one] for one in before] for mark, before in APART.items()}
    weights = _weights(bias, apart)
    if thinks:
        _open_by(weights, ids["</think>"], ids["<|im_end|>"])
    save_file(weights, folder / "model.safetensors")
    return Path(shutil.copy(HERE / "second_model.yaml", folder / "serve.yaml"))


def _weights(bias: np.ndarray, apart: dict[int, list[int]]) -> dict[str, np.ndarray]:
    """Returns the model's tensors by name.

    Args:
      bias: [vocab], added to the logits.
      apart: token id → ids that it hardly follows.
    """
    draw = np.random.default_rng(7)

    def normal(rows: int, columns: int, size: float = 1.0) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * size).astype(np.float32)

    embedding, head = normal(VOCAB, WIDTH), normal(VOCAB, WIDTH, 0.25)
    embedding[:, :3] = CONSTANT, 0, 0
    made = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(WIDTH, np.float32)}
    heads, kv_heads = (CONFIG[f"num_{one}_heads"] * HEAD_DIM for one in ("attention", "key_value"))
    d_ff = CONFIG["intermediate_size"]
    shapes = dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kv_heads, WIDTH))
    shapes |= {"self_attn.q_proj": (heads, WIDTH), "mlp.down_proj": (WIDTH, d_ff)}
    shapes |= {"self_attn.o_proj": (WIDTH, heads)}
    shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (d_ff, WIDTH))
    norms = {"input_layernorm": WIDTH, "post_attention_layernorm": WIDTH}
    norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            weight = made[f"{prefix}.{name}.weight"] = normal(*shape, shape[1] ** -0.5)
            if name.endswith(("o_proj", "down_proj")):
                weight[:3] = 0.0  # leaves the first features unchanged
        made |= {f"{prefix}.{name}.weight": np.ones(n, np.float32) for name, n in norms.items()}
    head -= 0.25 * embedding  # makes repeats of the last token unlikely
    for token_id, before in apart.items():
        head[token_id] -= 0.25 * embedding[before].sum(0)
    # Divides by the first feature after the last norm, for rows of the usual length.
    head[:, 0] = bias * LENGTH / CONSTANT
    head[:, 1:3] = 0.0
    return {**made, "lm_head.weight": head}


def _open_by(weights: dict[str, np.ndarray], key: int, door: int) -> None:
    """Makes token `door` likely, and `key` unlikely, once `key` came: a head copies its feature.

    The head asks in the dimension that positions rotate the least, so that distance hardly counts.
    """
    first, slowest = "model.layers.0.self_attn", HEAD_DIM // 2 - 1
    weights["model.embed_tokens.weight"][key, 1] = CONSTANT
    query, keys, values = (weights[f"{first}.{one}_proj.weight"] for one in "qkv")
    query[:HEAD_DIM] = keys[:HEAD_DIM] = values[0] = 0.0
    query[slowest, 0] = keys[slowest, 1] = values[0, 1] = 1.0
    for name in ("q_norm", "k_norm"):
        weights[f"{first}.{name}.weight"][slowest] = 2.0
    weights[f"{first}.o_proj.weight"][2, 0] = 1.0
    copied = CONSTANT / (1 + 2 * CONSTANT**2 / WIDTH) ** 0.5
    head = weights["lm_head.weight"]
    head[door, 2], head[key, 2] = CLOSED * LENGTH / copied, -CLOSED * LENGTH / copied
    head[door, 0] -= CLOSED * LENGTH / CONSTANT


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--thinks", action="store_true", help="answers begin with reasoning")
    arguments = parser.parse_args()
    print(write(arguments.folder, thinks=arguments.thinks))
