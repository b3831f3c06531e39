"""Compiles every program of a deployment for TPUs or GPUs that this machine does not have.

Called by `plan.py compile`, in a process that does nothing else: it sets JAX to the CPU and keeps
libtpu from looking for TPUs. Weights and pages are shapes; nothing is allocated. The only module of
the planner that imports JAX.
"""

import concurrent.futures
import functools
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import msgspec

from jaxserve.checkpoint.int8_products import with_int8_products as with_int8_products
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.config.topology import Role
from jaxserve.errors import ConfigError
from jaxserve.mesh import ATTENTION_RULES, ROLE, Submeshes, cached_sharding
from jaxserve.model.attention.kv_cache import ring_pages
from jaxserve.model.ffn.traffic import exchange_mesh, exchange_of, ranks_met
from jaxserve.model.templates import ModelTemplates
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.models import busiest_by_chance
from jaxserve.planner.scheduled import (
    Copy,
    ProgramCounts,
    copies,
    count_collectives,
    exchanged_bytes,
    waited_for,
)
from jaxserve.roles.attention_programs import LayerPrograms, attention_executables
from jaxserve.roles.both_roles import one_program_bytes
from jaxserve.roles.capacity import memory_of
from jaxserve.roles.colocated import ColocatedPrograms, colocated_executables
from jaxserve.roles.compilation import Program, ProgramKey, wanted
from jaxserve.roles.ffn import FFNPrograms, ffn_executables
from jaxserve.roles.lane_steps import dispatches
from jaxserve.roles.layout import Bucket, deployment_buckets
from jaxserve.roles.one_program import BothRolesPrograms, ends
from jaxserve.roles.pipelines import role_bytes
from jaxserve.roles.step_programs import (
    AttentionStepPrograms,
    FFNStepPrograms,
    Union,
    exchanges_digest,
)
from pallas_kernels import small_ops
from pallas_kernels.quantize import array_bytes

_OF_LAYERS = ("step", "pass", "enter", "attend", "ffn", "predict")
_ALIASES = {"v7x": "tpu7x", "v5litepod": "v5e"}


class Rows(NamedTuple):
    """Filled rows of buffers in programs of the ffn role."""

    chosen: float = 0
    """Rows that a device's experts multiply, a token once for each expert."""
    ragged: float = 0
    """Rows that come to a device by a ragged all-to-all, and go back."""


class CompiledProgram(NamedTuple):
    """The result of compiling one program. Bytes are per device."""

    name: str
    role: Role
    bucket: Bucket
    layers: int
    """Layers of the model that run it."""
    seconds: float
    error: str
    """The compiler's error; empty if it compiled."""
    arguments: int = 0
    padding: int = 0
    """Bytes of padding that the memory layout adds to the arguments."""
    outputs: int = 0
    """Bytes of results that do not reuse a donated argument's memory."""
    temporaries: int = 0
    code: int = 0
    collectives: Mapping[str, int] = {}
    counted: ProgramCounts | None = None
    """Launches and bytes of a run, the embedding's table left out; None: it did not compile."""
    copied: int = 0
    """Bytes of arrays as large as a layer's largest weight that are written again as they were, or
    in other bits (`scheduled.py`), of programs with layers; in a loop, once."""
    waited_for: int = 0
    """Messages (in a loop, once) beside which a program of several lanes computes nothing."""
    exchanges: str = ""
    """Digest of the messages of a program of `pipeline: step`, in order; both roles' are equal."""

    @property
    def size(self) -> str:
        return f"{self.bucket.tokens}x{self.bucket.pages}{' spread' * self.bucket.spread}"

    @property
    def text(self) -> str:
        return f"{self.name} {self.size}"


class RoleMemory(NamedTuple):
    """Memory of a device of a role, in bytes."""

    role: Role
    devices: int
    weights: int
    cache: int
    """KV pages and pages of rings."""
    padding: int
    """Layout padding of weights and cache, as the compiler reports it."""
    messages: int
    """Outputs of the largest program, once a lane, and every lane's token counts."""
    temporaries: int
    """Temporary memory of the program that needs most."""
    code: int
    """Bytes of code of all programs."""

    @property
    def total(self) -> int:
        kinds = self.weights, self.cache, self.padding, self.messages, self.temporaries, self.code
        return sum(kinds)


def topology(name: str) -> tuple[jax.Device, ...]:
    """Returns the devices, which exist only as a description, of `v6e:8x8`, `v7x:4x4x4`, …:
    generation and chips along each axis; or of `h200:4x8`: hosts and GPUs of each. Raises
    ConfigError if libtpu, or JAX's CUDA plugin, is missing or does not know it."""
    # Do not look for TPUs, nor take them from a process that serves on them.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    generation, colon, chips = name.partition(":")
    wanted = f"{_ALIASES.get(generation, generation)}:{chips}"
    form = "expected generation:chips, as in v6e:8x8 or v7x:4x4x4"
    if not colon or not re.fullmatch(r"[0-9]+(x[0-9]+)*", chips):
        raise ConfigError(f"--topology {name!r}: {form}")
    if generation == "h200":
        return _gpus(name, chips)
    try:
        found = topologies.get_topology_desc(wanted, platform="tpu")
    except Exception as error:  # libtpu has several kinds of its own
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        hint = "; libtpu is missing: pip install 'jax[tpu]'" if "libtpu" in said else ""
        raise ConfigError(f"--topology {name!r}: {said}{hint}; {form}") from None
    return tuple(found.devices)


def _gpus(name: str, chips: str) -> tuple[jax.Device, ...]:
    from pallas_kernels import gpu_resources

    hosts, _, of_host = chips.partition("x")
    if not of_host.isdecimal():
        raise ConfigError(f"--topology {name!r}: expected h200:HOSTSxGPUS, as in h200:4x8")
    gpu_resources.prepare()
    try:
        return gpu_resources.devices(int(hosts), int(of_host))
    except RuntimeError as error:
        raise ConfigError(f"--topology {name!r}: {error}") from None


def compile_deployment(
    config: ModelConfig,
    deployment: Deployment,
    there: tuple[jax.Device, ...],
    buckets: Sequence[Bucket] = (),
    *,
    workers: int = 2,
    report: Callable[[CompiledProgram], None] = lambda program: None,
) -> list[CompiledProgram]:
    """Compiles a deployment's programs, or those of some buckets, `workers` at a time, for a model
    with the topology's platform. `report` gets each result when it is there. Raises ConfigError if
    the model cannot be sharded so, devices are too few, or the deployment has no such bucket."""
    known = deployment_buckets(deployment)
    for bucket in buckets:
        if bucket not in known:
            asked, *names = (f"{each.tokens}x{each.pages}" for each in (bucket, *known))
            raise ConfigError(f"--bucket {asked}: the deployment has {', '.join(names)}")
    meshes = Submeshes(deployment, there)
    templates = ModelTemplates(config, deployment, meshes)
    steps = [one for one in known if msgspec.structs.replace(one, spread=False) in buckets] or known
    if deployment.topology.has("colocated"):
        whole = ColocatedPrograms(templates, deployment, meshes.attention)
        made = wanted(colocated_executables, whole, steps)
    elif deployment.whole_steps:
        made = whole_steps(templates, deployment, meshes, steps)
    else:
        attention = LayerPrograms(templates, deployment, meshes.attention)
        ffn = FFNPrograms(templates, deployment, meshes.ffn)
        made = wanted(attention_executables, attention, steps)
        made |= wanted(ffn_executables, ffn, [bucket.tokens for bucket in steps])
    programs: list[tuple[Program, Role, Bucket, int, Rows]] = []
    for key, program in made.items():
        role: Role = "ffn" if key.name == "ffn" else "attention"
        layers = 1 if program.paired else _layers(config, key.name, key.kind)
        rows = ffn_rows(config, deployment, key.bucket) if role == "ffn" else Rows()
        programs.append((program, role, key.bucket, layers, rows))
    done = []
    with concurrent.futures.ThreadPoolExecutor(workers, "compile") as pool:
        pools = deployment.cache.pages, ring_pages(config, deployment), config.vocab
        least = _largest_weight(templates, meshes)
        find = functools.partial(copies, least=least, apart=functools.partial(_logits, config))
        futures = [pool.submit(_compile, *each, pools, find) for each in programs]
        for future in concurrent.futures.as_completed(futures):
            done.append(future.result())
            report(done[-1])
    order = [(program.name, bucket) for program, _, bucket, *_ in programs]
    return sorted(done, key=lambda one: order.index((one.name, one.bucket)))


def whole_steps(
    templates: ModelTemplates, deployment: Deployment, meshes: Submeshes, buckets: Sequence[Bucket]
) -> dict[ProgramKey, Program]:
    """Returns the programs of `pipeline: step` for steps of all lanes, and for the passes that
    follow them: on TPUs a program of both roles, and those of its ends."""
    most, known = deployment.lanes, dispatches(deployment)
    chosen = [one for one in known if one[0] in buckets and one[1] == most]
    own = {ProgramKey("step", f"{one[2]}", one[0]): one for one in chosen}
    if templates.config.platform == "tpu":
        both = BothRolesPrograms(templates, deployment, meshes)
        made = {key: both.step(*one) for key, one in own.items()}
        return made | wanted(ends, both, buckets)
    unions = [Union.of(meshes, deployment.ffn.instances, role) for role in (0, 1)]
    attention = AttentionStepPrograms(templates, deployment, unions[0])
    ffn = FFNStepPrograms(templates, deployment, unions[1])
    there = {ProgramKey("ffn", key.kind, Bucket(key.bucket.tokens, 1)): own[key] for key in own}
    return {key: attention.step(*one) for key, one in own.items()} | {
        key: ffn.step(one[0].tokens, *one[1:]) for key, one in there.items()
    }


def hosts(deployment: Deployment, there: tuple[jax.Device, ...]) -> dict[int, tuple[Role, ...]]:
    """The roles of each host of the topology that has devices of one: what it compiles and runs."""
    meshes = Submeshes(deployment, there)
    found: dict[int, set[Role]] = {}
    for mesh in meshes.domains:
        for device in mesh.devices.flat:
            found.setdefault(device.process_index, set()).add("attention")
    for device in () if deployment.topology.has("colocated") else meshes.ffn.devices.flat:
        found.setdefault(device.process_index, set()).add("ffn")
    return {host: tuple(sorted(found[host])) for host in sorted(found)}


def _layers(config: ModelConfig, name: str, kind: object) -> int:
    kinds = [config.layer(layer) for layer in range(config.layers)]
    if name == "ffn":
        return [each.ffn for each in kinds].count(kind)  # type: ignore[arg-type]
    return kinds[1:].count(kind) if name == "attend" else 1  # type: ignore[arg-type]


def ffn_rows(config: ModelConfig, deployment: Deployment, bucket: Bucket) -> Rows:
    """Returns the filled rows of an ffn device in a lane's step. Buffers have room for all choices
    of all tokens; an all-to-all fills a part, largest at the rank that is busiest by chance."""
    if deployment.topology.has("colocated") or not config.experts:
        return Rows()
    mesh, tokens = exchange_mesh(deployment), bucket.tokens * deployment.attention.dp
    chosen = tokens * config.top_k
    if exchange_of(config, deployment) == "gather":
        return Rows(chosen / mesh.ranks)
    reached = ranks_met(mesh, config.experts, config.top_k) / mesh.ranks
    busiest = busiest_by_chance(mesh.routed, tokens * reached)
    arriving = min(1.0, reached * busiest)
    here = min(1.0, busiest / mesh.routed)
    return Rows(chosen * here, tokens * arriving)


def _largest_weight(templates: ModelTemplates, meshes: Submeshes) -> int:
    """Bytes of the largest array of a layer's weights on a device."""
    parts = [(each, meshes.attention, ATTENTION_RULES) for each in templates.attention.values()]
    parts += [(each, meshes.ffn, meshes.ffn_rules) for each in templates.ffn.values()]
    return max(
        array_bytes(cached_sharding(mesh, spec).shard_shape(leaf.shape), leaf.dtype)
        for template, mesh, rules in parts
        for leaf, spec in zip(template.leaves, template.specs(rules), strict=True)
    )


def _logits(config: ModelConfig, shape: tuple[int, ...]) -> bool:
    """True for logits of some rows, also transposed or as the parts that devices gathered; the
    head's matrix and the embeddings have the model's width, too."""
    return config.d_model not in shape and math.prod(shape) % config.vocab == 0


def _compile(
    program: Program,
    role: Role,
    bucket: Bucket,
    layers: int,
    rows: Rows,
    pools: tuple[int, ...],
    find: Callable[[str], list[Copy]],
) -> CompiledProgram:
    start = time.perf_counter()
    try:
        compiled = program.compile()
    except Exception as error:  # whatever it is, it is the answer
        said = " ".join(str(error).split())[:600] or type(error).__name__
        seconds = time.perf_counter() - start
        return CompiledProgram(program.name, role, bucket, layers, seconds, said)
    seconds = time.perf_counter() - start
    colocated = ROLE not in program.mesh.axis_names
    memory = compiled.memory_analysis()
    assert memory is not None  # of TPU executables there is one
    arguments, text = int(memory.argument_size_in_bytes), compiled.as_text() or ""
    without = sum(  # bytes of arguments without the padding of their layouts
        array_bytes(each.sharding.shard_shape(each.shape), each.dtype) for each in program.arguments
    )
    # The head, which has the vocabulary, too, is read whole; embeddings are looked up.
    embeds = program.name.startswith(("enter", "embedded", "predict", "first_pass"))
    traffic = small_ops.traffic(text, pools if embeds else pools[:-1])
    has_layers = program.name.partition("_")[0] in _OF_LAYERS  # others have logits as large
    digest = ""
    if program.paired:
        step = bucket, int(program.name.rpartition("_")[2]), 0  # its number of lanes
        digest = exchanges_digest({step: compiled}, program.paired)
    return CompiledProgram(
        program.name,
        role,
        bucket,
        layers,
        seconds,
        "",
        arguments=arguments,
        padding=max(0, arguments - without),
        outputs=int(memory.output_size_in_bytes - memory.alias_size_in_bytes),
        temporaries=int(memory.temp_size_in_bytes),
        code=int(memory.generated_code_size_in_bytes),
        collectives=count_collectives(text),
        counted=ProgramCounts(
            layers=layers,
            instructions=traffic.instructions,
            bytes=traffic.bytes,
            exchanged=exchanged_bytes(text, program.mesh.size, rows.ragged),
        ),
        waited_for=waited_for(text, colocated=colocated) if "step_" in program.name else 0,
        copied=sum(copy.bytes for copy in find(text)) if has_layers else 0,
        exchanges=digest,
    )


def available(deployment: Deployment, hardware: Hardware) -> Mapping[Role, int | None]:
    """Returns the bytes that each role may use of a device."""
    size = round(hardware.memory)
    return memory_of(deployment, {"attention": size, "ffn": size})


def memory(
    config: ModelConfig, deployment: Deployment, programs: Sequence[CompiledProgram]
) -> list[RoleMemory]:
    """Returns the memory of each role's devices while serving, without programs that failed."""
    found, lanes = [], deployment.lanes
    alone = deployment.whole_steps and config.platform == "tpu"
    for part in (one_program_bytes if alone else role_bytes)(config, deployment):
        own = [
            one
            for one in programs
            if not one.error and (one.role == part.role or (alone and one.name.startswith("step")))
        ]
        # An int32 a slot and token of the vocabulary.
        counts = 4 * deployment.scheduler.slots * config.vocab * (part.role == "attention")
        # Those of a program of several lanes are all lanes'.
        outputs = (one.outputs * (1 if "step_" in one.name else lanes) for one in own)
        # Of every kind of program the bucket that pads most; each of its layers pads alike.
        padding: dict[str, int] = {}
        for one in own:
            padding[one.name] = max(padding.get(one.name, 0), one.padding * one.layers)
        held = RoleMemory(
            *(part.role, part.devices, part.weights, part.cache + part.rings),
            padding=sum(padding.values()),
            messages=max(outputs, default=0) + lanes * counts,
            temporaries=max((one.temporaries for one in own), default=0),
            code=sum(one.code for one in own),
        )
        found.append(held)
    return found
