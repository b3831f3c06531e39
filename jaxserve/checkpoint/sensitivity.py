"""Measures on a text which layers tolerate attention in INT8 (xDeepServe §4.7).

Called by `jaxserve/convert.py`. Attention is the serving module over INT8 pages, in FP32 otherwise.
Every token has a row of the page table, as in decode: latent attention then takes its absorbed
form, which is the form that multiplies in INT8. Weights are read once per pass: each layer
processes the rows of every tried set of layers. Sets that agree on all layers so far share rows.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxserve.calibration import forward
from jaxserve.checkpoint.conversion import write_record
from jaxserve.checkpoint.fingerprint import Revision
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.int8_products import Int8Products
from jaxserve.checkpoint.manifest import StoredBlock, blocks_of
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.model import LayerKind
from jaxserve.mesh import ATTENTION_RULES, Rules, Submeshes, cached_sharding
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.kv_cache import layer_entries, page_arrays
from jaxserve.model.module import Template
from jaxserve.model.templates import ModelTemplates
from jaxserve.storage.mirror import INT8_PRODUCTS, local_folder

PAGE = 16
Layers = frozenset[int]


class ProductLoss(NamedTuple):
    """Cost of INT8 products in some layers, relative to float products on the same INT8 pages."""

    layers: list[int]
    divergence: float
    """Mean of KL(floats ‖ INT8) over all tokens, nats."""
    perplexity: float
    """Increase of perplexity, percent."""
    noise: float
    """Standard error of the increase, percent, from the differences between sequences."""

    @property
    def most(self) -> float:
        """Upper bound of the increase, percent: two standard errors above it, or above 0 if the
        measured increase is negative."""
        return max(self.perplexity, 0.0) + 2 * self.noise


def measure(
    folder: str | Path,
    sequences: np.ndarray,
    budget: float,
    on_layer: Callable[[int, int, str], None] = lambda done, layers, note: None,
    ignored: Collection[str] = (),
) -> tuple[list[ProductLoss], ProductLoss | None]:
    """Measures every layer alone, then the least sensitive layers together; writes the list.

    Layers are taken in the order of their divergence. Among the layers that are within the budget
    alone, the longest prefix of that order that is within the budget together is chosen.

    Args:
      folder: a Hugging Face folder or a converted one.
      sequences: int [sequences, tokens], at least 2 of each.
      budget: percent of perplexity that all chosen layers together may cost, two standard errors
        included.
      on_layer: called with the number of finished layers, the number of all layers, and a note.
      ignored: see `read_config`.

    Returns:
      The losses of single layers, in layer order, and the loss of the chosen set; None: no layer
      was chosen.

    Raises:
      ConfigError, CheckpointError: the model cannot be read.
    """
    revision = Revision(local_folder(folder))
    model = _MeasuredModel(folder, sequences, ignored)
    count = model.config.layers

    def losses(sets: Sequence[Layers], passes: int) -> list[ProductLoss]:
        def counted(layer: int) -> None:
            on_layer(passes * count + layer + 1, 2 * count, f"pass {passes + 1}, layer {layer}")

        return model.losses(sets, counted)

    alone = losses([frozenset((layer,)) for layer in range(count)], 0)
    tried = prefixes(alone, budget)
    together = losses(tried, 1) if tried else []
    chosen = longest(together, budget)
    measured = {
        "budget": budget,
        "tokens": int(sequences.size),
        "perplexity": model.perplexity,
        "alone": [one._asdict() for one in alone],
        "together": chosen and chosen._asdict(),
    }
    layers = chosen.layers if chosen else []
    revision.check()
    found = Int8Products(revision.digest, layers, measured)
    write_record(Path(folder) / INT8_PRODUCTS, found)
    return alone, chosen


def prefixes(alone: Sequence[ProductLoss], budget: float) -> list[Layers]:
    """Sets of layers to be tried together: the least sensitive layer, the two least sensitive, …
    among the layers that are within the budget alone."""
    able = [one for one in sorted(alone, key=lambda one: one.divergence) if one.most <= budget]
    order = [layer for one in able for layer in one.layers]
    return [frozenset(order[: size + 1]) for size in range(len(order))]


def longest(together: Sequence[ProductLoss], budget: float) -> ProductLoss | None:
    """The largest of the growing sets that is within the budget; None if none is."""
    return next((one for one in reversed(together) if one.most <= budget), None)


class _MeasuredModel:
    """Runs a text through the layers, once for each tried set of layers with INT8 products."""

    def __init__(self, folder: str | Path, sequences: np.ndarray, ignored: Collection[str]):
        self.config, names = read_config(folder, ignored)
        forward.refuse_unsupported(self.config)
        self._sequences = sequences
        tokens = sequences.shape[1]
        self._deployment = _deployment(folder, tokens)
        self._meshes = Submeshes(self._deployment)
        every = self.config.with_int8_products(range(self.config.layers))
        self._of = {
            in_int8: ModelTemplates(config, self._deployment, self._meshes)
            for in_int8, config in ((False, self.config), (True, every))
        }
        self._blocks = {block.name: block for block in blocks_of(names)}
        self._checkpoint = open_checkpoint(folder, names)
        self._attend = functools.cache(self._compiled)
        self.perplexity = math.nan

    def losses(self, sets: Sequence[Layers], on_layer: Callable[[int], None]) -> list[ProductLoss]:
        """Returns the loss of each set of layers."""
        plain: Layers = frozenset()
        embedding = self._leaves("embedding", self._of[False].embedding, ATTENTION_RULES)["table"]
        rows = {plain: np.asarray(embedding, np.float32)[self._sequences]}
        for layer in range(self.config.layers):
            known = {one & frozenset(range(layer + 1)) for one in (plain, *sets)}
            rows = self._layer(layer, {one: rows[one - {layer}] for one in known}, known)
            on_layer(layer)
        head = self._leaves("head", self._of[False].head, ATTENTION_RULES)
        base = [self._log_probabilities(head, one) for one in rows[plain]]
        nats = self._nats(base)
        self.perplexity = math.exp(nats.mean())
        found = []
        for one in sets:
            mine = [self._log_probabilities(head, sequence) for sequence in rows[one]]
            pairs = zip(base, mine, strict=True)
            divergence = [np.sum(np.exp(b) * (b - m), axis=-1).mean() for b, m in pairs]
            more = (self._nats(mine) - nats).mean(axis=1)
            noise = more.std(ddof=1) / math.sqrt(len(more))
            found.append(
                ProductLoss(
                    sorted(one),
                    float(np.mean(divergence)),
                    100 * math.expm1(more.mean()),
                    100 * float(noise),
                )
            )
        return found

    def _layer(
        self, layer: int, before: dict[Layers, np.ndarray], sets: set[Layers]
    ) -> dict[Layers, np.ndarray]:
        """Runs one layer: takes and returns rows [sequences, tokens, d_model] by set of layers."""
        kind = self.config.layer(layer)
        templates = self._of[False]
        attention = self._leaves(
            f"layers.{layer}.attention", templates.attention[kind], ATTENTION_RULES
        )
        rules = self._meshes.ffn_rules
        ffn = self._leaves(f"layers.{layer}.ffn", templates.ffn[kind.ffn], rules)
        floats = {name: np.asarray(leaf) for name, leaf in ffn.items()}
        behind = {}
        for one in sets:
            attend = self._attend(kind._replace(int8_products=layer in one))
            made = []
            for sequence in before[one]:
                x, normed, *routed = map(np.asarray, attend([*attention.values()], sequence))
                routing = forward.RoutedRows(*routed) if kind.ffn.router else None
                made.append(x + forward.feed_forward(floats, normed, routing))
            behind[one] = np.stack(made)
        return behind

    def _compiled(self, kind: LayerKind) -> Callable[..., tuple[Array, ...]]:
        """Compiles attention of one kind. The function takes (leaves, rows [tokens, d_model]) and
        returns the rows after attention, the FFN's normed input and, for MoE, experts and gates."""
        template = self._of[kind.int8_products].attention[kind]
        entries = layer_entries(self.config, kind.attention, self._deployment)
        arrays, tokens = page_arrays(self._deployment, entries), self._sequences.shape[1]

        def attend(leaves: list[Array], x: Array) -> tuple[Array, ...]:
            place = jnp.arange(tokens, dtype=jnp.int32)
            table = jnp.arange(arrays[0].shape[0], dtype=jnp.int32)
            table = jnp.broadcast_to(table, (tokens, len(table)))
            batch = RaggedBatch(place, place, table, place)
            pages = tuple(jnp.zeros(array.shape, array.dtype) for array in arrays)
            x, message, _ = template.merge(leaves)(x, pages, batch, self.config.experts)
            if message.experts is None or message.gates is None:
                return x, message.tokens
            return x, message.tokens, message.experts, message.gates

        return self._on_mesh(attend)

    def _log_probabilities(self, head: dict[str, Array], rows: np.ndarray) -> np.ndarray:
        """Log probabilities of the token after each row but the last, FP32 [tokens - 1, vocab]."""
        logits = self._head([*head.values()], rows[:-1])
        return np.asarray(jax.nn.log_softmax(logits, axis=-1))

    @functools.cached_property
    def _head(self) -> Callable[..., Any]:
        template = self._of[False].head
        return self._on_mesh(lambda leaves, rows: template.merge(leaves)(rows))

    def _on_mesh(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        everywhere = PartitionSpec()
        mesh = self._meshes.attention
        return jax.jit(
            jax.shard_map(
                compute, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
            )
        )

    def _nats(self, said: Sequence[np.ndarray]) -> np.ndarray:
        """Negative log likelihood in nats of every token but the first, [sequences, tokens - 1]."""
        targets = self._sequences[:, 1:, None]
        pairs = zip(said, targets, strict=True)
        return -np.stack([np.take_along_axis(one, ids, axis=1)[:, 0] for one, ids in pairs])

    def _leaves(self, name: str, template: Template, rules: Rules) -> dict[str, Array]:
        """Loads a block's leaves as floats, by name."""
        block: StoredBlock = self._blocks[name]
        mesh = self._meshes.attention
        shardings = [cached_sharding(mesh, spec) for spec in template.specs(rules)]
        leaves = self._checkpoint.leaves(template, block.sources, shardings)
        return dict(zip(template.names, leaves, strict=True))


def _deployment(folder: str | Path, tokens: int) -> Deployment:
    """A deployment on one device with pages for one sequence, each of whose tokens is a slot."""
    pages = -(-tokens // PAGE)
    return load_deployment(
        folder,
        {
            "mode": "colocated",
            "dtype": "float32",
            "attention.weights": "float32",
            "ffn.weights": "float32",
            "cache.format": "int8",
            "cache.page_size": PAGE,
            "cache.pages": pages,
            "scheduler.slots": tokens,
            "scheduler.max_length": tokens,
            "scheduler.token_budget": tokens,
        },
    )
