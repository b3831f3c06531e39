"""The checks that need devices, each a function of a deployment; run by `worker.py`.

Random weights depend on the names of a checkpoint's tensors alone, so all layouts of a model have
the same ones, and their tokens can be compared.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from jaxserve.bench.stages import bucket_of, measure
from jaxserve.checkpoint.int8_products import read_model
from jaxserve.checkpoint.random_leaves import RandomLeaves, open_random
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.config.topology import INSIDE, TRANSPORTS, Role
from jaxserve.engine.runtime import Runtime, warm_up
from jaxserve.fleet.arguments import from_arguments
from jaxserve.fleet.assembly import Options, build_runtime
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.mesh_transport import MeshTransport
from jaxserve.link.dispatch.message import answer_format, message_formats
from jaxserve.link.dispatch.route import Route
from jaxserve.link.transports import opens
from jaxserve.mesh import Submeshes, memory_limit
from jaxserve.model.attention.kv_cache import ring_pages
from jaxserve.model.matrix_formats import placed
from jaxserve.observe.recorder import Recorder
from jaxserve.preflight.exchange import exchange, narrow
from jaxserve.preflight.leaves import DeviceLeaves, first_of_each_kind, only_layers, open_on_devices
from jaxserve.preflight.outcomes import Failed, Outcome, Skipped
from jaxserve.roles.capacity import GB, check_memory
from jaxserve.roles.layout import Bucket, token_sizes
from jaxserve.roles.pipelines import sizes_of
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows

Found = tuple[str, dict[str, Any]]
STEPS = 3
"""Decode steps of every lane that are measured."""
MESSAGES = 16
"""Messages in flight at a time where bandwidth is measured."""
SPAN_SECONDS = 60.0
SLOW = 2


def memory(deployment: Deployment, options: argparse.Namespace) -> Found:
    """Compares the bytes of every role with what its devices have."""
    config, _ = read_model(deployment)
    meshes = Submeshes(deployment)
    own: dict[Role, set[jax.Device]] = {
        "attention": {device for mesh in meshes.domains for device in mesh.local_devices},
        "ffn": set(meshes.ffn.local_devices) if deployment.topology.has("ffn") else set(),
    }
    config = placed(config, meshes.ffn)
    lines: list[str] = []
    details: dict[str, Any] = {}
    sizes = sizes_of(deployment, meshes)
    for part in sizes(config, deployment):
        devices = own[part.role]
        if not devices:
            continue
        limits = [size for device in devices if (size := memory_limit(device)) is not None]
        limit = min(limits, default=None)
        written = getattr(deployment, part.role).memory_gb
        details[part.role] = {
            "device_kind": next(iter(devices)).device_kind,
            "devices": len(devices),
            "limit_gb": limit and limit / GB,
            "memory_gb": written,
            "needs_gb": part.total / GB,
        }
        has = "unknown" if limit is None else f"{limit / GB:.1f} GB"
        lines.append(f"{part.role} needs {part.total / GB:.3g} GB of {has}")
        if limit is not None and written * GB > limit:
            raise Failed(
                f"{part.role}.memory_gb = {written:g}, but a device has {limit / GB:.1f} GB",
                details,
            )
    check_memory(config, deployment, own, sizes)
    return "; ".join(lines), details


def links(deployment: Deployment, options: argparse.Namespace) -> Found:
    """Sends messages and answers of every size between the meshes by each transport of a runtime,
    compares the bytes, and times one round trip and many messages in flight."""
    if deployment.topology.has("colocated"):
        raise Skipped("mode colocated has no link")
    config, _ = read_model(deployment)
    contract, meshes = Contract.of(config, deployment), Submeshes(deployment)
    details: dict[str, Any] = {}
    wrong, lines = [], []
    for name in INSIDE:
        rows = []
        for tokens in token_sizes(deployment):
            try:
                rows.append(_link(opens(name), contract, meshes, tokens))
            except Exception as error:
                wrong.append(f"{name}, {tokens} tokens: {type(error).__name__}: {error}")
                break
        details[name] = rows
        if rows:
            small, large = rows[0], rows[-1]
            lines.append(
                f"{name} {small['round_trip'] * 1e6:.0f} µs of {small['bytes']} B there and back, "
                f"{large['bytes_per_second'] / 1e9:.3g} GB/s of {large['bytes']} B"
            )
    if wrong:
        raise Failed("\n".join(wrong), details)
    return "; ".join(lines), details


def transport(deployment: Deployment, options: argparse.Namespace) -> Found:
    """Compares the times of transports with those of the ones that they fall back to, which hosts
    of TPUs can rely on.

    Raises:
      Failed: a transport fails or is far slower.
    """
    if jax.process_count() == 1:
        raise Skipped("one host")
    text, details = links(deployment, options)
    for name in INSIDE:
        if usual := TRANSPORTS[name].falls_back_to:
            slow, expected = (details[each][0]["round_trip"] for each in (name, usual))
            if slow > SLOW * expected:
                raise Failed(
                    f"{name} takes more than {SLOW} times as long as {usual}: {text}", details
                )
    return text, details


def _link(
    transport: type[MeshTransport], contract: Contract, meshes: Submeshes, tokens: int
) -> dict[str, Any]:
    """Sends one size of message and its answer. Raises ValueError if other bytes arrived than were
    sent."""
    attention, ffn = meshes.attention, meshes.ffn
    route, rows = Route.of(contract, ffn.size), contract.piece_rows(tokens)
    message = message_formats(contract)[contract.layers[-1]]
    answer = answer_format(contract)
    there = _Way(transport("dispatch", route, attention, ffn, (rows, message.width), message.word))
    back = _Way(transport("combine", route, attention, ffn, (rows, answer.width), answer.dtype))
    there.check()
    back.check()
    both = [way for way in (there, back) if way.size]

    def round_trip() -> None:
        there.move()
        back.move()

    def in_flight() -> None:
        for _ in range(MESSAGES):
            there.enqueue()
        there.wait()
        for _ in range(MESSAGES):
            back.enqueue()
        back.wait()

    moved = sum(way.size for way in both)
    return {
        "tokens": tokens,
        "bytes": moved,
        "round_trip": _median(round_trip, 20),
        "bytes_per_second": MESSAGES * moved / _median(in_flight, 5),
    }


class _Way:
    """One direction of a link with a message of random words."""

    def __init__(self, transport: MeshTransport):
        self._transport = transport
        route, direction = transport.route, transport.direction
        count = 1 if direction == "dispatch" else route.slots
        rows, width = transport.source.size * transport.piece[0], transport.piece[1]
        generator = np.random.default_rng(7)
        self._values = [
            generator.integers(0, 100, (rows, width)).astype(transport.dtype) for _ in range(count)
        ]
        self._arrays = [
            jax.make_array_from_callback(
                value.shape,
                transport.source_sharding,
                value.__getitem__,
                dtype=transport.dtype,
            )
            for value in self._values
        ]
        self.size = len(route.legs) * self._values[0][: transport.piece[0]].nbytes
        self.size *= len(route.legs[0].attention)
        here = jax.process_index()
        self._sends = any(d.process_index == here for d in transport.source.devices.flat)
        self._receives = any(d.process_index == here for d in transport.destination.devices.flat)
        self._send = transport.sender() if self._sends else None
        self._receive = transport.receiver() if self._receives else None
        self._arrived: list[Any] = []

    def enqueue(self) -> None:
        """Sends one message, receives one, as far as this process does."""
        if self._send is not None:
            self._send(*self._arrays)
        if self._receive is not None:
            self._arrived.append(self._receive())

    def wait(self) -> None:
        """Waits for everything that was received."""
        jax.block_until_ready(self._arrived)
        self._arrived.clear()

    def move(self) -> None:
        """One message, received."""
        self.enqueue()
        self.wait()

    def check(self) -> None:
        """Compares the pieces that arrive with those that were sent."""
        self.enqueue()
        arrays = self._arrived.pop() if self._arrived else []
        rows = self._transport.piece[0]
        shards = [
            {
                shard.index[0].start or 0: np.asarray(shard.data)
                for shard in array.addressable_shards
            }
            for array in arrays
        ]
        for leg in self._transport.route.legs if arrays else ():
            array, sent = leg.answer, self._values[leg.slot % len(self._values)]
            pairs = list(zip(leg.ffn, leg.attention, strict=True))
            if self._transport.direction == "dispatch":
                array, sent = leg.slot, self._values[0]
                pairs = [(piece, device) for device, piece in pairs]
            for source, destination in pairs:
                found = shards[array].get(destination * rows)
                if found is not None and not np.array_equal(found, sent[source * rows :][:rows]):
                    raise ValueError(f"other bytes arrived at device {destination} than were sent")


def _median(call: Callable[[], None], times: int) -> float:
    """Seconds of a call, the median."""
    call()
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def layer(deployment: Deployment, options: argparse.Namespace) -> Found:
    """Compares the tokens of one layer of each kind, as deployed, with one device that has all."""
    if deployment.topology.has("colocated"):
        raise Skipped("mode colocated has one layout: nothing to compare")
    config, names = narrow(deployment, *first_of_each_kind(*read_model(deployment)))
    limits = deployment.scheduler
    deployment = msgspec.structs.replace(
        deployment,
        lanes=1,
        speculative=type(deployment.speculative)(),
        scheduler=msgspec.structs.replace(
            limits, token_buckets=limits.token_buckets[-1:], page_buckets=limits.page_buckets[-1:]
        ),
    )
    runtime = build_runtime(deployment, Options(config=config, names=names, weights=open_random))
    warm_up(runtime)
    bucket = runtime.buckets[-1]
    tokens = run_prompt(runtime, bucket)
    if tokens is None:
        return "attention's processes compare the tokens", {}
    wanted = run_prompt(colocated(deployment, config, names), bucket, groups=1)
    assert wanted is not None
    same = float(np.mean([np.mean(group == wanted[0]) for group in tokens]))
    least = 1.0 if deployment.dtype == "float32" and deployment.link.dispatch == "auto" else 0.8
    details = {"equal": same, "least": least, "layers": config.layers}
    text = f"{config.layers} layers: {same:.0%} of {tokens.size} tokens as on one device"
    if same < least:
        raise Failed(f"{text}, expected {least:.0%}", details)
    return text, details


def colocated(deployment: Deployment, config: ModelConfig, names: CheckpointNames) -> Runtime:
    """The model on one device of this process, in one program a step."""
    from jaxserve.model.templates import ModelTemplates
    from jaxserve.roles.colocated import ColocatedWorker
    from jaxserve.roles.pipelines import OpenModel

    tree = msgspec.to_builtins(deployment)
    tree |= {"mode": "colocated", "domains": 1, "link": {}, "fleet": {}}
    tree["attention"] |= {"dp": 1, "tp": 1, "processes": 0}
    tree["ffn"] |= {"ep": 1, "tp": 1, "processes": 0, "instances": 1, "shared": "split"}
    tree["ffn"] |= {"exchange": "gather", "redundant_slots": 0}
    alone = msgspec.convert(tree, Deployment)
    meshes = Submeshes(alone, jax.local_devices()[:1])
    config = placed(config, meshes.ffn)
    templates = ModelTemplates(config, alone, meshes)
    worker = ColocatedWorker(OpenModel(config, names, meshes, templates, RandomLeaves()), alone)
    return Runtime(alone, config, worker)


def run_prompt(runtime: Runtime, bucket: Bucket, groups: int | None = None) -> np.ndarray | None:
    """Runs a prompt a slot in one step and then decode steps, all greedy.

    Returns:
      Tokens [groups, steps, slots] of this process's attention devices; None without any.
    """
    deployment, driver = runtime.deployment, runtime.driver
    slots, size = deployment.scheduler.slots, deployment.cache.page_size
    groups = groups or deployment.attention.dp
    rings = ring_pages(runtime.config, deployment)
    each = max(1, min(bucket.tokens // slots, 8, size * bucket.pages - STEPS))
    used = min(slots, deployment.cache.pages // -(-(each + STEPS) // size))
    pages = -(-(each + STEPS) // size)
    generator = np.random.default_rng(3)
    prompts = generator.integers(1, runtime.config.vocab, (used, each))
    following = generator.integers(1, runtime.config.vocab, (STEPS, used))
    found = []
    for step in range(STEPS + 1):
        said = following[step - 1, :, None] if step else prompts
        rows = [
            SequenceRow(
                slot=slot,
                token_ids=said[slot].tolist(),
                kv_length=each + step,
                page_ids=list(range(slot * pages, (slot + 1) * pages)),
                sample=True,
            )
            for slot in range(used)
        ]
        plan = plan_of_rows(0, step, bucket, [rows] * groups, slots=slots, rings=rings)
        driver.begin(plan)
        finished: Any = driver.advance()
        jax.block_until_ready(finished.last)
        if hasattr(finished, "sampled"):
            found.append(np.asarray(finished.sampled.addressable_data(0))[:, :used])
    return np.stack(found, axis=1) if found else None


def steps(deployment: Deployment, options: argparse.Namespace) -> Found:
    """Runs decode steps of the deployment with random weights, and records every stage."""
    config, names = read_model(deployment)
    if options.layers and options.layers < config.layers:
        config, names = only_layers(config, names, range(options.layers))
        deployment = msgspec.structs.replace(deployment, speculative=type(deployment.speculative)())
    begun = time.monotonic()
    runtime = build_runtime(
        deployment, Options(config=config, names=names, weights=open_on_devices)
    )
    warm_up(runtime)
    built = time.monotonic() - begun
    return measured_steps(runtime, built)


def measured_steps(runtime: Runtime, built: float) -> Found:
    """Runs and records the steps of a warm runtime."""
    deployment = runtime.deployment
    batches, contexts = loads_of(deployment)
    wanted = argparse.Namespace(batches=batches, contexts=contexts, steps=STEPS)
    runtime.driver.observer = None
    rings = ring_pages(runtime.config, deployment)
    measure(deployment, runtime.driver, wanted, 1, rings)
    recorder = Recorder(jax.process_index())
    runtime.driver.observer = recorder
    begun = time.perf_counter()
    measure(deployment, runtime.driver, wanted, 1, rings)
    count = len(batches) * len(contexts) * STEPS * deployment.lanes
    spans = recorder.ended(SPAN_SECONDS)
    seconds = (time.perf_counter() - begun) / count
    details = {
        "kind": jax.local_devices()[0].device_kind,
        "built_seconds": built,
        "step_seconds": seconds,
        "layers": runtime.config.layers,
        "spans": msgspec.to_builtins(spans),
    }
    text = f"{count} steps of {runtime.config.layers} layers, {seconds * 1e3:.1f} ms each"
    return f"{text}; ready after {built:.0f} s", details


def loads_of(deployment: Deployment) -> tuple[list[int], list[int]]:
    """Sequences a DP group and tokens of a sequence: few and many, as far as buckets and pages
    go."""
    limits, cache = deployment.scheduler, deployment.cache
    batches = sorted({max(1, limits.slots // 4), limits.slots})
    longest = min(limits.max_length, cache.pages // limits.slots * cache.page_size)
    contexts = sorted({max(1, longest // 4), longest})
    for batch, context in itertools.product(batches, contexts):
        bucket_of(deployment, batch, context)
    return batches, contexts


def attention_steps(deployment: Deployment, options: argparse.Namespace) -> Found:
    """Runs the decode steps of an attention worker whose ffn worker is another runtime."""
    from jaxserve.fleet.attention_runtime import attention_cell
    from jaxserve.fleet.role_runtime import open_role
    from jaxserve.roles.attention_bytes import attention_bytes

    begun = time.monotonic()
    role = open_role(deployment, "attention", attention_bytes)
    token = from_arguments(options).token
    cell, client = attention_cell(role, deployment, DeviceLeaves(), token)
    try:
        runtime = Runtime(deployment, role.config, cell)
        warm_up(runtime)
        return measured_steps(runtime, time.monotonic() - begun)
    finally:
        client.close()


def ffn_steps(deployment: Deployment, options: argparse.Namespace) -> Found:
    """Starts the ffn worker of a runtime of its own; it answers until its process is ended."""
    from jaxserve.fleet.ffn_runtime import message_server
    from jaxserve.fleet.role_runtime import open_role
    from jaxserve.roles.ffn_bytes import ffn_bytes

    role = open_role(deployment, "ffn", ffn_bytes)
    address, token = deployment.link.addresses[0], from_arguments(options).token
    server, _ = message_server(role, deployment, DeviceLeaves(), token, address)
    listening = server.start()
    outcome = Outcome("ffn-steps", "passed", listening)
    Path(options.result).write_bytes(msgspec.json.encode(outcome))
    while True:
        time.sleep(1.0)


PARTS: Mapping[str, Callable[[Deployment, argparse.Namespace], Found]] = {
    "memory": memory,
    "links": links,
    "exchange": exchange,
    "transport": transport,
    "layer": layer,
    "steps": steps,
    "attention-steps": attention_steps,
    "ffn-steps": ffn_steps,
}
"""Functions by the names of checks."""
