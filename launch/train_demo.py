"""Trains, exports, evaluates and samples the demo checkpoint: a small Step-3 on Python's library.

    python launch/train_demo.py initialise             configs/demo with random weights
    python launch/train_demo.py train --minutes 75     warm-up, constant rate, decay to zero
    python launch/train_demo.py evaluate               held-out bits a byte, next to xz
    python launch/train_demo.py sample --temperature 0.6

Runs on two CPU cores; needs the `train` extra (flax, optax, tokenizers, safetensors). The schedule
counts minutes, not steps, because it is the minutes that are given. The weights are written at the
end, and on SIGINT or SIGTERM as they are by then.
"""

import argparse
import functools
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import demo_checkpoint
import demo_data
import demo_evaluation
import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_model import DemoConfig, DemoModel
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO_FOLDER = REPOSITORY / "configs" / "demo"
REPORTED_STEPS = 20
"""Steps between lines of output."""


@dataclass(frozen=True)
class Phase:
    """How the rows look from a share `begin` of the minutes on.

    Short windows first: the attention's scores are a quarter of the time at 256 tokens, and there
    is enough to learn that is local. `prediction_share` is the share of the rows on which the
    prediction module is trained: it costs as much as a layer and a head, and learns fast.
    """

    begin: float
    length: int
    prediction_share: float


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, next to the minutes."""

    seed: int = 0
    tokens_per_step: int = 2048
    phases: tuple[Phase, ...] = (
        Phase(0.0, 128, 0.25),
        Phase(0.35, 256, 0.25),
        Phase(0.7, 512, 0.5),
        Phase(0.92, 1024, 0.5),
    )
    matrix_rate: float = 0.016  # Muon
    other_rate: float = 0.003  # AdamW: head, norms, routers
    embedding_rate: float = 0.015  # AdamW
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_share: float = 0.8  # of the minutes; small batches are noisy at the peak rate
    # Rows of CPython's tests, before and during the decay.
    test_share: float = 0.1
    test_share_in_decay: float = 0.0
    prediction_weight: float = 0.2
    balance_weight: float = 0.01

    def phase(self, progress: float) -> Phase:
        """The phase that holds when a share `progress` of the minutes is over."""
        return [phase for phase in self.phases if progress >= phase.begin][-1]


@dataclass
class Progress:
    """Counts of a run so far."""

    step: int = 0
    tokens: int = 0
    minutes: float = 0.0
    decay_begin: float | None = None


# --- parameters and optimiser ---------------------------------------------------------------

Parameters = dict[str, jax.Array]


def split_model(model: DemoModel) -> tuple[nnx.GraphDef, Parameters]:
    """The model's structure, and its parameters by dotted path."""
    graph, state = nnx.split(model, nnx.Param)
    return graph, {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(state)}


def join_model(graph: nnx.GraphDef, parameters: Parameters) -> DemoModel:
    """The inverse of `split_model`."""
    flat: dict = {
        tuple(int(part) if part.isdigit() else part for part in name.split(".")): nnx.Param(value)
        for name, value in parameters.items()
    }
    return nnx.merge(graph, nnx.from_flat_state(flat))


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon for matrices and stacked experts, AdamW for the rest; rates are the peak rates."""

    def matrices(parameters: Parameters) -> dict:
        return {name: _matrix_axes(name, value) for name, value in parameters.items()}

    def embedding(parameters: Parameters) -> dict:
        return {name: name == "embed_tokens" for name in parameters}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            recipe.matrix_rate,
            weight_decay=recipe.weight_decay,
            adam_learning_rate=recipe.other_rate,
            adam_b2=0.98,
            muon_weight_dimension_numbers=matrices,
        ),
        optax.masked(optax.scale(recipe.embedding_rate / recipe.other_rate), embedding),
    )


def _matrix_axes(name: str, value: object) -> MuonDimensionNumbers | None:
    is_router = name.endswith("moe.gate.weight")
    dimensions = getattr(value, "ndim", 0)  # optax also asks about its placeholders
    if dimensions < 2 or is_router or name in ("embed_tokens", "lm_head.weight"):
        return None
    return MuonDimensionNumbers(reduction_axis=dimensions - 2, output_axis=dimensions - 1)


# --- one step -------------------------------------------------------------------------------


def losses(
    model: DemoModel, windows: jax.Array, recipe: Recipe, phase: Phase
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Total loss of windows [batch, length + 2], and its parts."""
    length = windows.shape[1] - 2
    hidden, routings = model.hidden(windows[:, :length])
    nats = optax.softmax_cross_entropy_with_integer_labels
    main = nats(model.lm_head(hidden), windows[:, 1 : length + 1]).mean()
    rows = max(1, round(len(windows) * phase.prediction_share))
    ahead, routing = model.predict(windows[:rows, 1 : length + 1], hidden[:rows])
    prediction = nats(model.lm_head(ahead), windows[:rows, 2:]).mean()
    routings = [*routings, routing]
    balance = sum(routing.balance for routing in routings)
    loss = main + recipe.prediction_weight * prediction + recipe.balance_weight * balance
    imbalance = jnp.stack([r.load.max() * len(r.load) for r in routings])
    return loss, {"main": main, "prediction": prediction, "imbalance": imbalance}


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def train_step(
    graph: nnx.GraphDef,
    recipe: Recipe,
    phase: Phase,
    parameters: Parameters,
    optimizer_state: optax.OptState,
    windows: jax.Array,
    multiplier: float,
) -> tuple[Parameters, optax.OptState, dict[str, jax.Array]]:
    """One update at `multiplier` times the peak rates. Returns parameters, state and the losses."""

    def loss_of(parameters: Parameters) -> tuple[jax.Array, dict[str, jax.Array]]:
        return losses(join_model(graph, parameters), windows, recipe, phase)

    (_, parts), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
    updates, optimizer_state = make_optimizer(recipe).update(gradients, optimizer_state, parameters)
    updates = jax.tree.map(lambda update: update * multiplier, updates)
    return optax.apply_updates(parameters, updates), optimizer_state, parts


# --- training -------------------------------------------------------------------------------


class Batches:
    """Draws the rows of each step from the library and from the tests."""

    def __init__(self, library: np.ndarray, test: np.ndarray, recipe: Recipe, progress: Progress):
        self.recipe, self.progress = recipe, progress
        self.library = demo_data.WindowStream(library, recipe.seed)
        self.test = demo_data.WindowStream(test, recipe.seed + 1)

    def next_batch(self, length: int, test_share: float) -> np.ndarray:
        """Returns int32 [rows, length + 2]."""
        rows = self.recipe.tokens_per_step // length
        random = np.random.default_rng([self.recipe.seed, self.progress.step])
        # Some distributions of Python leave the tests out.
        from_test = random.random(rows) < (test_share if len(self.test.tokens) else 0.0)
        windows = [
            (self.test if choice else self.library).next_window(length, extra=2)
            for choice in from_test
        ]
        return np.stack(windows)


def rate_multiplier(recipe: Recipe, progress: Progress, end: float) -> float:
    """Warm-up by steps, then 1, then linear in the minutes from `decay_begin` to 0 at `end`."""
    warmup = (progress.step + 1) / recipe.warmup_steps
    if progress.decay_begin is None:
        return min(1.0, warmup)
    left = (end - progress.minutes) / max(end - progress.decay_begin, 1e-6)
    return max(0.0, min(1.0, warmup, left))


def train(arguments: argparse.Namespace) -> None:
    """Trains until the minutes are used up, then writes the weights in BF16."""
    recipe = Recipe()
    tokenizer = demo_checkpoint.load_tokenizer(arguments.folder)
    corpus = demo_data.load_corpus()
    library = demo_data.pack(corpus.library, tokenizer)
    test = demo_data.pack(corpus.test, tokenizer)
    graph, parameters = split_model(DemoModel(DemoConfig(), nnx.Rngs(recipe.seed)))
    optimizer_state, progress = make_optimizer(recipe).init(parameters), Progress()
    end = arguments.minutes
    print(f"{len(library):,} library and {len(test):,} test tokens; until minute {end:.1f}")
    batches = Batches(library, test, recipe, progress)
    stop = stop_on_signal()
    begin = reported = time.monotonic()
    while progress.minutes < end and not stop():
        if progress.decay_begin is None and progress.minutes >= end * (1 - recipe.decay_share):
            progress.decay_begin = progress.minutes
        decaying = progress.decay_begin is not None
        phase = recipe.phase(progress.minutes / end)
        share = recipe.test_share_in_decay if decaying else recipe.test_share
        windows = batches.next_batch(phase.length, share)
        multiplier = rate_multiplier(recipe, progress, end)
        parameters, optimizer_state, parts = train_step(
            graph, recipe, phase, parameters, optimizer_state, windows, multiplier
        )
        jax.block_until_ready(parts)
        progress.step += 1
        progress.tokens += windows.shape[0] * phase.length
        now = time.monotonic()
        progress.minutes = (now - begin) / 60
        if progress.step % REPORTED_STEPS == 0:
            report(progress, phase.length, multiplier, parts, now - reported)
            reported = now
    model = join_model(graph, parameters)
    demo_checkpoint.save_weights(model, arguments.folder / "model.safetensors")
    count = sum(weight.size for _, weight, _ in demo_checkpoint.checkpoint_entries(model))
    print(f"step {progress.step}, {count:,} parameters")
    demo_checkpoint.print_size(arguments.folder)


def report(progress: Progress, length: int, multiplier: float, parts: dict, seconds: float) -> None:
    """Prints one line on the last step."""
    imbalance = " ".join(f"{value:.2f}" for value in np.asarray(parts["imbalance"]))
    print(
        f"minute {progress.minutes:6.2f}  step {progress.step:5d}  tokens {progress.tokens:9,d}"
        f"  window {length}  rate {multiplier:.3f}  main {parts['main']:.3f}"
        f"  prediction {parts['prediction']:.3f}  imbalance {imbalance}  ({seconds:.1f} s)",
        flush=True,
    )


def stop_on_signal() -> Callable[[], bool]:
    """Returns a function that says whether SIGINT or SIGTERM has come."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    return lambda: bool(received)


# --- the checkpoint folder ------------------------------------------------------------------


def initialise(arguments: argparse.Namespace) -> None:
    """Writes the whole folder: tokenizer, configuration and random weights."""
    config = DemoConfig()
    folder: Path = arguments.folder
    corpus = demo_data.load_corpus()
    tokenizer = demo_data.train_tokenizer((f.text for f in corpus.library), config.vocab_size)
    if tokenizer.get_vocab_size() != config.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} entries")
    held_out = [file.name for file in corpus.held_out]
    demo_checkpoint.save_description(config, tokenizer, held_out, folder)
    demo_checkpoint.save_weights(DemoModel(config, nnx.Rngs(0)), folder / "model.safetensors")
    demo_checkpoint.print_size(folder)


def evaluate(arguments: argparse.Namespace) -> None:
    """Prints held-out bits a byte of the checkpoint and of xz, and the routing."""
    demo_evaluation.evaluate(arguments.folder)


def sample(arguments: argparse.Namespace) -> None:
    """Continues a prompt with the checkpoint and prints all of it."""
    a = arguments
    print(demo_evaluation.sample(a.folder, a.prompt, a.tokens, a.temperature, a.seed))


# --- command line ---------------------------------------------------------------------------


def positive(text: str) -> float:
    """A number above zero; for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line. Exits with a message on bad arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--folder", type=Path, default=DEMO_FOLDER, help="checkpoint folder")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, function: Callable) -> argparse.ArgumentParser:
        description = (function.__doc__ or "").splitlines()[0]
        added = commands.add_parser(
            name, parents=[common], help=description, description=description
        )
        added.set_defaults(function=function)
        return added

    command("initialise", initialise)
    training = command("train", train)
    training.add_argument("--minutes", type=positive, default=75.0, help="minutes in all")
    command("evaluate", evaluate)
    sampling = command("sample", sample)
    # A line break and the indentation after it are one token with the punctuation before them, so
    # a prompt should end with its indentation, not between the two.
    sampling.add_argument("--prompt", default="def fibonacci(n):\n    ")
    sampling.add_argument("--tokens", type=int, default=120)
    sampling.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    sampling.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    """Entry point."""
    arguments = parse(sys.argv[1:])
    try:
        arguments.function(arguments)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"train_demo.py: {error}")


if __name__ == "__main__":
    main()
