"""Evaluates the demo checkpoint: held-out bits per byte beside xz's, and samples to look at.

Called by `train_demo.py`. Computes in FP32 from the BF16 file.
"""

import lzma
import math
from pathlib import Path

import demo_checkpoint
import demo_data
import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_model import DemoModel
from tokenizers import Tokenizer

WINDOW = 1024  # tokens
STRIDE = 512  # tokens by which windows advance
ROWS = 8  # windows a batch


@jax.jit
def score(model: DemoModel, windows: jax.Array) -> dict[str, jax.Array]:
    """Per position of windows [batch, length + 2]: nats, right or wrong, and experts chosen.

    `agreement` is whether the prediction module's choice of t_{i+2} is what the main model would
    choose itself one token later: the acceptance rate of one greedy draft. `both` and, where there
    is a second module, `both_modules` are whether a second draft is accepted, too: made by the
    first module on its own states, or by the second.
    """
    length = windows.shape[1] - 2
    hidden, routings = model.hidden(windows[:, :length])
    logits = model.lm_head(hidden)
    ahead, routing = model.predict(windows[:, 1 : length + 1], hidden)
    choice = jnp.argmax(logits, axis=-1)
    drafted = jnp.argmax(model.lm_head(ahead), axis=-1)
    agreement = drafted == jnp.roll(choice, -1, axis=1)
    second = {}
    for name, module in zip(("both", "both_modules"), range(len(model.predictions)), strict=False):
        further, _ = model.predict(windows[:, 2:], ahead, module)
        redrafted = jnp.argmax(model.lm_head(further), axis=-1)
        second[name] = agreement & (redrafted == jnp.roll(choice, -2, axis=1))
    return {
        "nats": optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1 : length + 1]),
        "correct": choice == windows[:, 1 : length + 1],
        "prediction": drafted == windows[:, 2:],
        "agreement": agreement,
        **second,
        "expert": jnp.stack(
            [r.expert.reshape(*choice.shape, -1) for r in [*routings, routing]], axis=-2
        ),
    }


def held_out_windows(
    files: list[demo_data.SourceFile], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping windows over every file.

    Returns: windows int32 [n, WINDOW + 2], padded with `<|end|>`; and bool [n, WINDOW], true at
    the positions whose next token counts. Every token of every file counts exactly once, with at
    least WINDOW - STRIDE tokens of context, or the whole file so far.
    """
    begin, end = demo_data.special_ids(tokenizer)
    windows, counted = [], []
    for file in files:
        ids = tokenizer.encode(file.text, add_special_tokens=False).ids
        tokens = np.array([begin, *ids], np.int32)
        done = 0  # positions whose next token has been counted
        while done < len(ids):
            start = max(0, done - (WINDOW - STRIDE))
            window = np.full(WINDOW + 2, end, np.int32)
            piece = tokens[start : start + WINDOW + 2]
            window[: len(piece)] = piece
            position = np.arange(start, start + WINDOW)
            windows.append(window)
            counted.append((position >= done) & (position < len(ids)))
            done = start + WINDOW
    return np.stack(windows), np.stack(counted)


def evaluate(folder: Path) -> None:
    """Prints held-out bits a byte of the checkpoint and of xz, and how evenly it routes."""
    files = demo_data.load_corpus().held_out
    model = demo_checkpoint.load_model(folder)
    windows, counted = held_out_windows(files, demo_checkpoint.load_tokenizer(folder))
    inner = counted.copy()  # positions after which two counted tokens stand in the window
    inner[:, :-1] &= counted[:, 1:]
    inner[:, -1] = False
    innermost = inner.copy()  # and three
    innermost[:, :-1] &= inner[:, 1:]
    names = ["nats", "correct", "prediction", "agreement", "both", "both_modules"]
    sums = dict.fromkeys(names[: 4 + len(model.predictions)], 0.0)
    experts = model.config.moe_num_experts
    load = np.zeros((len(model.config.moe_layers) + 1, experts))
    for first in range(0, len(windows), ROWS):
        rows = windows[first : first + ROWS]
        padding = np.zeros((ROWS - len(rows), WINDOW + 2), np.int32)
        scores = {
            name: np.asarray(value)[: len(rows)]
            for name, value in score(model, np.concatenate([rows, padding])).items()
        }
        for name in sums:
            mask = counted if name in ("nats", "correct") else inner
            mask = innermost if name.startswith("both") else mask
            sums[name] += scores[name][mask[first : first + ROWS]].sum(dtype=np.float64)
        chosen = scores["expert"][counted[first : first + ROWS]]  # [tokens, layers, top_k]
        for layer in range(len(load)):
            load[layer] += np.bincount(chosen[:, layer].reshape(-1), minlength=experts)
    total = sum(len(file.text.encode()) for file in files)
    imbalance = " ".join(f"{value:.2f}" for value in load.max(axis=1) / load.mean(axis=1))
    whole, separate = xz_bits(files)
    print(f"held-out            {len(files)} files, {total:,} bytes, {int(counted.sum()):,} tokens")
    print(f"model               {sums['nats'] / math.log(2) / total:.4f} bits/byte")
    print(f"xz -9e, all at once {whole / total:.4f} bits/byte")
    print(f"xz -9e, file by file {separate / total:.4f} bits/byte")
    print(f"next token, top-1   {sums['correct'] / counted.sum():.4f}")
    print(f"next-next token of the prediction module, top-1 {sums['prediction'] / inner.sum():.4f}")
    print(f"the same against the main model's own choice    {sums['agreement'] / inner.sum():.4f}")
    one, count = 1 + sums["agreement"] / inner.sum(), innermost.sum()
    print(f"tokens a step, one draft                       {one:.4f}")
    print(f"two drafts of the first module                 {one + sums['both'] / count:.4f}")
    if "both_modules" in sums:
        print(
            f"two drafts, the second of a second module {one + sums['both_modules'] / count:9.4f}"
        )
    print(f"expert load, max/mean a layer (the last is the prediction module) {imbalance}")


def xz_bits(files: list[demo_data.SourceFile]) -> tuple[int, int]:
    """Bits of the files under `xz -9e`: concatenated, and summed over files."""
    preset = 9 | lzma.PRESET_EXTREME
    contents = [file.text.encode() for file in files]
    whole = 8 * len(lzma.compress(b"".join(contents), preset=preset))
    return whole, 8 * sum(len(lzma.compress(content, preset=preset)) for content in contents)


@jax.jit
def next_logits(model: DemoModel, tokens: jax.Array, last: jax.Array) -> jax.Array:
    """Logits [vocab] after position `last` of one padded sequence [tokens]."""
    hidden, _ = model.hidden(tokens[None])
    return model.lm_head(hidden[0, last])


def sample(folder: Path, prompt: str, count: int, temperature: float, seed: int) -> str:
    """Returns the prompt and up to `count` more tokens, greedily if `temperature` is 0.

    Computes the whole sequence anew for every token: it has no cache, and needs none.
    """
    tokenizer = demo_checkpoint.load_tokenizer(folder)
    model = demo_checkpoint.load_model(folder)
    _, end = demo_data.special_ids(tokenizer)
    ids = tokenizer.encode(prompt).ids
    padded = np.full(-(-(len(ids) + count) // 256) * 256, end, np.int32)
    padded[: len(ids)] = ids
    random = np.random.default_rng(seed)
    for position in range(len(ids), len(ids) + count):
        logits = np.asarray(next_logits(model, padded, position - 1), np.float64)
        if temperature > 0:
            logits = logits / temperature + random.gumbel(size=logits.shape)
        token = int(logits.argmax())
        if token == end:
            break
        padded[position] = token
        ids.append(token)
    return tokenizer.decode(ids[1:])
