"""Trains a second prediction module for the demo checkpoint; everything else is frozen.

    python launch/train_second_module.py --minutes 60

xDeepServe §4.6: a module of its own for the second draft, with the main model and the first module
frozen, is accepted more often than the first module used twice. It starts as a copy of the first
and learns the main model's own distribution two tokens later (what a draft is compared with), not
the text's. Writes the checkpoint folder again; the frozen weights keep their bits.
"""

import argparse
import functools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import demo_checkpoint
import demo_data
import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_model import DemoModel
from flax import nnx
from train_demo import (
    DEMO_FOLDER,
    Parameters,
    Recipe,
    join_model,
    make_optimizer,
    positive,
    split_model,
    stop_on_signal,
)

SECOND = "predictions.1."
"""Prefix of the names of the trained parameters."""

RECIPE = replace(Recipe(), matrix_rate=0.008, other_rate=0.001, weight_decay=0.01)
WINDOW = 256


def with_second_module(model: DemoModel) -> DemoModel:
    """The same model with one more prediction module, a copy of the first."""
    config = replace(model.config, num_nextn_predict_layers=2)
    graph, _ = split_model(DemoModel(config, nnx.Rngs(0)))
    _, parameters = split_model(model)
    first = "predictions.0."
    copies = {
        SECOND + name.removeprefix(first): jnp.array(value)
        for name, value in parameters.items()
        if name.startswith(first)
    }
    return join_model(graph, {**copies, **parameters})


def loss_of(model: DemoModel, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For windows [batch, length], returns the loss, and the share of positions at which the second
    module's choice for t_{i+3} equals the main model's."""
    hidden, _ = model.hidden(tokens)
    target = model.lm_head(hidden)[:, 2:]
    ahead, _ = model.predict(tokens[:, 1:], hidden[:, :-1])
    hidden, ahead, target = jax.lax.stop_gradient((hidden, ahead, target))
    further, routing = model.predict(tokens[:, 2:], ahead[:, :-1], module=1)
    logits = model.lm_head(further)
    nats = optax.softmax_cross_entropy(logits, jax.nn.softmax(target)).mean()
    agreement = (logits.argmax(-1) == target.argmax(-1)).mean()
    return nats + RECIPE.balance_weight * routing.balance, agreement


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 3))
def train_step(
    graph: nnx.GraphDef,
    trained: Parameters,
    frozen: Parameters,
    optimizer_state: optax.OptState,
    tokens: jax.Array,
    multiplier: float,
) -> tuple[Parameters, optax.OptState, jax.Array, jax.Array]:
    """One update at `multiplier` times the peak rates."""

    def loss(trained: Parameters) -> tuple[jax.Array, jax.Array]:
        return loss_of(join_model(graph, {**frozen, **trained}), tokens)

    (nats, agreement), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
    updates, optimizer_state = make_optimizer(RECIPE).update(gradients, optimizer_state, trained)
    updates = jax.tree.map(lambda update: update * multiplier, updates)
    return optax.apply_updates(trained, updates), optimizer_state, nats, agreement


def train(folder: Path, output: Path, minutes: float) -> None:
    """Trains until the minutes are over or a signal comes; the rate decays to 0 by then."""
    tokenizer = demo_checkpoint.load_tokenizer(folder)
    library = demo_data.pack(demo_data.load_corpus().library, tokenizer)
    stream = demo_data.WindowStream(library, RECIPE.seed + 2)
    model = demo_checkpoint.load_model(folder)
    if model.config.num_nextn_predict_layers == 1:
        model = with_second_module(model)
    graph, parameters = split_model(model)
    trained = {name: value for name, value in parameters.items() if name.startswith(SECOND)}
    frozen = {name: value for name, value in parameters.items() if name not in trained}
    state, stop, step = make_optimizer(RECIPE).init(trained), stop_on_signal(), 0
    begin, recent = time.monotonic(), []
    while (progress := (time.monotonic() - begin) / 60 / minutes) < 1 and not stop():
        rows = range(RECIPE.tokens_per_step // WINDOW)
        tokens = np.stack([stream.next_window(WINDOW, extra=0) for _ in rows])
        multiplier = min(1.0, (step + 1) / RECIPE.warmup_steps, (1 - progress) / RECIPE.decay_share)
        trained, state, nats, agreement = train_step(
            graph, trained, frozen, state, tokens, multiplier
        )
        recent.append((float(nats), float(agreement)))
        step += 1
        if step % 20 == 0:
            loss, agreed = np.mean(recent, axis=0)
            recent.clear()
            print(
                f"minute {progress * minutes:6.2f}  step {step:5d}  loss {loss:.4f}  the main "
                f"model's choice {agreed:.4f}",
                flush=True,
            )
    demo_checkpoint.save_weights(
        join_model(graph, {**frozen, **trained}), output / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 2
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    demo_checkpoint.print_size(output)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=DEMO_FOLDER, help="checkpoint folder")
    parser.add_argument("--output", type=Path, help="where the result goes; default: the folder")
    parser.add_argument("--minutes", type=positive, default=60.0)
    arguments = parser.parse_args()
    try:
        train(arguments.folder, arguments.output or arguments.folder, arguments.minutes)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"train_second_module.py: {error}")


if __name__ == "__main__":
    main()
