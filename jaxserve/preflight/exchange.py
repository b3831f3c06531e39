"""Comparison of the all-to-all exchange with the gather, on random rows of one narrow layer.

Run before a deployment with `ffn.exchange: alltoall` serves from GPUs (`commands/self_tests.py`)
and by `jaxserve preflight`.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.checkpoint.random_leaves import RandomLeaves
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.fleet.role_runtime import role_mesh
from jaxserve.mesh import (
    FFN_AXES,
    AbstractSubmeshes,
    GivenMeshes,
    Submeshes,
    expert_axes,
    ffn_rules,
)
from jaxserve.model.ffn.placement import home_slots, replica_table
from jaxserve.model.ffn.traffic import ExchangeKind
from jaxserve.model.matrix_formats import placed
from jaxserve.model.message import DispatchMessage
from jaxserve.model.templates import ModelTemplates
from jaxserve.preflight.leaves import only_layers
from jaxserve.preflight.outcomes import Failed, Skipped
from jaxserve.roles.compilation import use_compilation_cache
from jaxserve.roles.expert_programs import Bank
from jaxserve.roles.ffn import FFNPrograms
from jaxserve.roles.layout import Bucket, token_sizes
from jaxserve.roles.weights import load_leaves

WIDTH = 128
"""Most rows of an expert's matrices a device: the exchange does not depend on it."""
NEAR = 0.03
"""Largest ‖all-to-all − gather‖ / ‖gather‖."""
CALLS = 10

_Pieces = list[tuple[tuple[int, int], np.ndarray]]
"""Answers of this process's devices, by device and slot."""


def exchange(deployment: Deployment, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Compares both exchanges on random rows, and on rows that all go to the first rank.

    Raises:
      Skipped: the deployment has one rank of experts.
      Failed: results differ.
    """
    use_compilation_cache()
    config, names = read_model(deployment)
    if not config.experts or deployment.expert_ranks == 1:
        raise Skipped("one rank has all experts")
    first = next(layer for layer, kind in enumerate(config.decoder) if kind.ffn.router)
    config, names = narrow(deployment, *only_layers(config, names, [first]))
    meshes = meshes_of(deployment)
    here = jax.process_index()
    if not any(device.process_index == here for device in meshes.ffn.devices.flat):
        return "ffn's processes compare", {}
    config = placed(config, meshes.ffn)
    details: dict[str, Any] = {}
    found: dict[ExchangeKind, list[_Pieces]] = {}
    for kind in ("gather", "alltoall"):
        found[kind], details[kind] = _answers(deployment, config, names, meshes, kind)
    worst = 0.0
    for right, got in zip(found["gather"], found["alltoall"], strict=True):
        apart = sum(float(np.sum((a - b) ** 2)) for (_, a), (_, b) in zip(right, got, strict=True))
        whole = sum(float(np.sum(a**2)) for _, a in right)
        distance = (apart / max(whole, 1e-30)) ** 0.5
        worst = max(worst, distance if np.isfinite(distance) else np.inf)
    details["distance"] = worst
    text = f"gather {details['gather'] * 1e6:.0f} µs, alltoall {details['alltoall'] * 1e6:.0f} µs"
    if worst > NEAR:
        raise Failed(f"alltoall is off by {worst:.2g} of gather's results; {text}", details)
    return f"{text} a narrow layer; off by {worst:.2g}", details


def narrow(
    deployment: Deployment, config: ModelConfig, names: CheckpointNames
) -> tuple[ModelConfig, CheckpointNames]:
    """The model with narrow experts, which are quickly made at random."""
    tp = (deployment.ffn if deployment.topology.has("ffn") else deployment.attention).tp

    def narrowed(kind: LayerKind) -> LayerKind:
        ffn = kind.ffn
        if not ffn.router:
            return kind
        width = min(ffn.expert_d_ff, WIDTH * tp)
        shared = ffn.d_ff // ffn.expert_d_ff * width or min(ffn.d_ff, width)
        return kind._replace(ffn=msgspec.structs.replace(ffn, expert_d_ff=width, d_ff=shared))

    return msgspec.structs.replace(config, decoder=tuple(map(narrowed, config.decoder))), names


def meshes_of(deployment: Deployment) -> GivenMeshes:
    """The meshes of the deployment's devices; colocated, one for both roles."""
    if not deployment.topology.has("ffn"):
        mesh = Submeshes(deployment).attention
        ffn = Mesh(mesh.devices, FFN_AXES)
        return GivenMeshes(mesh, ffn, ffn_rules(ffn))
    if deployment.topology.crosses_runtimes:
        ffn = role_mesh(deployment, "ffn")
        return GivenMeshes(AbstractSubmeshes(deployment).attention, ffn, ffn_rules(ffn))
    both = Submeshes(deployment)
    return GivenMeshes(both.attention, both.ffn, both.ffn_rules)


def _answers(
    deployment: Deployment,
    config: ModelConfig,
    names: CheckpointNames,
    meshes: GivenMeshes,
    kind: ExchangeKind,
) -> tuple[list[_Pieces], float]:
    """The answers to both messages, and seconds of a call."""
    sizes = {"ep": meshes.ffn.size // meshes.ffn.shape["tp"], "tp": meshes.ffn.shape["tp"]}
    ffn = msgspec.structs.replace(deployment.ffn, exchange=kind, **sizes)
    deployment = msgspec.structs.replace(deployment, ffn=ffn, mode="afd")
    templates = ModelTemplates(config, deployment, meshes)
    programs = FFNPrograms(templates, deployment, meshes.ffn)
    tokens = token_sizes(deployment)[0]
    (template,) = templates.ffn.values()
    leaves = load_leaves(RandomLeaves(), template, names.ffn[0], meshes.ffn, meshes.ffn_rules)
    bank = Bank((0,), programs.slots)
    table = replica_table(home_slots(programs.slots), programs.slots)[None]
    compiled = programs.ffn(Bucket(tokens, 1), config.moe).compile()

    def call(message: list[jax.Array]) -> list[jax.Array]:
        counts = _put(
            np.zeros(bank.counts.shape, bank.counts.dtype),
            meshes.ffn,
            bank.counts_spec(expert_axes(meshes.ffn)),
        )
        made = compiled(*message, _put(table, meshes.ffn, PartitionSpec()), counts, *leaves)
        return list(jax.block_until_ready(made))[:-1]

    found = []
    for skewed in (False, True):
        message = _message(programs, config, tokens, skewed)
        found.append(_pieces(programs, call(message)))
    begun = time.perf_counter()
    for _ in range(CALLS):
        call(message)
    return found, (time.perf_counter() - begun) / CALLS


def _message(
    programs: FFNPrograms, config: ModelConfig, tokens: int, skewed: bool
) -> list[jax.Array]:
    """Random rows on every slot; skewed: all choose the same experts, which one rank holds."""
    generator = np.random.default_rng(5)
    rows = programs.mesh.size * programs.contract.piece_rows(tokens)
    arrays = []
    for _ in range(programs.route.slots):
        experts = np.argsort(generator.random((rows, config.experts)), axis=1)[:, : config.top_k]
        if skewed:
            experts = np.tile(np.arange(config.top_k), (rows, 1))
        message = DispatchMessage(
            jnp.asarray(generator.normal(size=(rows, config.d_model)), programs.dtype),
            jnp.asarray(experts, jnp.int32),
            jnp.full((rows, config.top_k), 1 / config.top_k, jnp.float32),
        )
        packed = np.asarray(programs.formats["moe"].pack(message))
        spec = PartitionSpec(tuple(programs.mesh.shape))
        arrays.append(_put(packed, programs.mesh, spec))
    return arrays


def _pieces(programs: FFNPrograms, answers: list[jax.Array]) -> _Pieces:
    """Answers on slots that hold a piece."""
    filled = set(programs.route.filled) if programs.route.instances == 1 else None
    places = {device: number for number, device in enumerate(programs.mesh.devices.flat)}
    found: _Pieces = []
    for slot, answer in enumerate(answers):
        for shard in answer.addressable_shards:
            device = places[shard.device]
            if filled is None or device * programs.route.slots + slot in filled:
                rows = programs.answers.total([shard.data], jnp.dtype(jnp.float32))
                found.append(((device, slot), np.asarray(rows)))
    return sorted(found, key=lambda one: one[0])


def _put(value: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), value.__getitem__)
