"""Counts of a deployment's compiled programs, without a device: launches, bytes, collectives, and
what kernels take beyond their bytes. Called by `estimate.py`, which makes stage times of them.
"""

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FormatName
from jaxserve.config.model import ModelConfig, platform_of
from jaxserve.config.topology import Role
from jaxserve.errors import ConfigError
from jaxserve.model.ffn.traffic import exchange_of
from jaxserve.model.row_width import deployment_row_bytes
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.hardware import Hardware, load_hardware
from jaxserve.planner.models import load_model, model_config, model_folder
from jaxserve.planner.scheduled import ProgramCounts
from jaxserve.roles.layout import Bucket
from pallas_kernels.estimate import model as kernels

ATTENTION = "step3 fp8 decode"
"""Case of `pallas_kernels.estimate` whose cycles attention's kernel takes on GPUs."""
COUNTED_PAGE = 128
"""Tokens of a page in counted cases of TPUs."""
PROGRAMS = ("enter", "attend", "leave", "ffn")
"""Programs of a step. Programs of a layer append the layer's kind."""


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of a deployment, written by `plan estimate --count` into `configs/estimates/`."""

    config: str
    model: str
    format: FormatName
    """Number format of weights, cache and messages."""
    topology: str
    context: int
    tokens: int
    """Tokens of a lane in a step, on all attention devices together."""
    dp: int
    tp: int
    ep: int
    ffn_tp: int
    lanes: int
    """Lanes that take turns: a sequence has a token when all lanes have passed all layers."""
    kernels: dict[str, float]
    """Seconds of `attend`'s and `ffn`'s kernels beyond their bytes' time, shared experts' whole."""
    cached: int
    """Bytes of the cache that a device reads in a layer."""
    message: dict[str, int]
    """Bytes of a device's `dispatch` and `combine`."""
    programs: dict[str, ProgramCounts]
    instances: int = 1
    """Instances of the ffn role: copies of a message, and answers to it."""
    sorts: int = 1
    """Calls of `sort_choices` in `ffn_moe`."""
    note: str = "estimate"

    @property
    def generation(self) -> str:
        """Name of the hardware: `h200`, `v6e`, …."""
        return self.topology.partition(":")[0]

    @property
    def hardware(self) -> Hardware:
        return load_hardware(self.generation)

    def members(self, role: Role) -> tuple[int, int]:
        """Returns the mesh of a role, of a single instance for ffn: collectives stay inside one."""
        return (self.ep // self.instances, self.ffn_tp) if role == "ffn" else (self.dp, self.tp)

    @property
    def devices(self) -> int:
        return self.dp * self.tp + self.ep * self.ffn_tp

    @property
    def layers(self) -> int:
        return sum(one.layers for name, one in self.programs.items() if role_of(name) == "ffn")

    def by_layer(self, role: Role, seconds: Mapping[str, float]) -> list[float]:
        """Returns the seconds of a role's programs layer by layer, without a step's end."""
        own = ((name, one) for name, one in self.programs.items() if role_of(name) == role)
        return [seconds[name] for name, one in own if name != "leave" for _ in range(one.layers)]


def role_of(program: str) -> Role:
    """Role that runs a program."""
    return "ffn" if program.startswith("ffn") else "attention"


def count(options: argparse.Namespace, deployment: Deployment) -> Counts:
    """Compiles and counts; raises ConfigError if a case is unknown, or a program fails."""
    config = model_config(model_folder(deployment.model, options.configs), served=True)
    if deployment.topology.has("colocated"):
        raise ConfigError(f"{options.config}: an AFD deployment is expected")
    windows = [n for n, kind in enumerate(config.decoder) if kind.attention.window]
    if windows or deployment.attention.int8_products not in ("none", []):
        raise ConfigError(
            f"{options.config}: attention with a window (layers {windows}) or "
            f"attention.int8_products = {deployment.attention.int8_products} is not counted"
        )
    from jaxserve.planner import aot  # imports JAX

    generation, size = options.topology.partition(":")[0], options.bucket
    platform = platform_of(load_hardware(generation).platform)
    config = msgspec.structs.replace(config, platform=platform)
    there = aot.topology(options.topology)
    programs = {}
    for one in aot.compile_deployment(config, deployment, there, [size]):
        if one.error:
            raise ConfigError(f"{one.name}: {one.error}")
        if one.counted and one.name.partition("_")[0] in PROGRAMS:
            programs[one.name] = one.counted
    context, tokens = options.context, size.tokens
    attention, ffn = deployment.attention, deployment.ffn
    message = deployment_row_bytes(config, deployment)
    model = load_model(str(deployment.model), options.configs)
    formats = Formats(
        weights="bfloat16" if ffn.weights == "auto" else ffn.weights,
        cache="bfloat16" if deployment.cache.format == "auto" else deployment.cache.format,
        dispatch=deployment.dispatch_format,
        combine=deployment.link.combine,
    )
    row = model.declared(model.attention[0].spec, formats, attention.tp, platform).row_bytes
    if platform == "tpu":
        of_kernels = _tpu_kernels(generation, config, deployment, tokens * context)
    else:
        chosen = aot.ffn_rows(config, deployment, size).chosen
        of_experts = _beyond_bytes(_experts_case(config, deployment, size), chosen)
        of_kernels = {
            "attend": _beyond_bytes(ATTENTION, tokens * context),
            "ffn": of_experts + _shared_seconds(config, deployment, size),
        }
    return Counts(
        config=Path(options.config).stem,
        model=Path(deployment.model).name,
        format=formats.weights,
        topology=options.topology,
        context=context,
        tokens=tokens * attention.dp,
        dp=attention.dp,
        tp=attention.tp,
        ep=ffn.ep,
        ffn_tp=ffn.tp,
        lanes=deployment.lanes,
        kernels=of_kernels,
        cached=int(row * tokens * context),
        message={"dispatch": tokens * message.packed, "combine": tokens * message.result},
        programs=programs,
        instances=ffn.instances,
        # Choices by expert and, with an all-to-all, by rank. TPUs have no kernel that sorts.
        sorts=(1 + (exchange_of(config, deployment) == "alltoall")) * (platform == "gpu"),
    )


def _tpu_kernels(
    generation: str, config: ModelConfig, deployment: Deployment, positions: int
) -> dict[str, float]:
    """Returns the seconds of both kernels on a TPU core beyond the time of their bytes, at this
    number of cached positions. Of an expert, only gate and up were counted; down is taken to be
    alike. Raises ConfigError if a case was not counted."""
    model, ffn = Path(deployment.model).name, deployment.ffn
    columns = 1.5 * config.experts // ffn.ep * config.moe.expert_d_ff // ffn.tp

    def beyond_bytes(case: str, units: float) -> float:
        one = _counted(case, generation)
        copies = one["copies"] * COUNTED_PAGE / deployment.cache.page_size
        made = kernels.estimate_tpu(one | {"units": units, "copies": copies})
        return made.seconds - made.floor

    return {
        "attend": beyond_bytes(f"{model} {deployment.cache_format}", positions),
        "ffn": beyond_bytes(f"{model}_2a2f {ffn.weights}: gate and up", columns),
    }


def _experts_case(config: ModelConfig, deployment: Deployment, bucket: Bucket) -> str:
    """Returns the counted case of a device's experts and tokens; raises ConfigError without."""
    from pallas_kernels.grouped_matmul.shapes import ExpertShape  # imports JAX

    ffn, tokens = deployment.ffn, bucket.tokens * deployment.attention.dp
    columns, groups = config.moe.expert_d_ff // ffn.tp, config.experts // ffn.ep
    here = ExpertShape(config.d_model, columns, groups, config.experts, config.top_k)
    weights = "bf16" if ffn.weights in ("auto", "bfloat16") else ffn.weights
    form = "fp8_block_rows" if weights == "fp8" else weights
    found = _name_of(here)
    if found is None:
        raise ConfigError(f"no kernels were counted for experts as {here}")
    return f"{found} {form} {tokens}"


def _name_of(shape: tuple[int, ...]) -> str | None:
    from pallas_kernels.grouped_matmul.shapes import SHAPES  # imports JAX

    return next((name for name, known in SHAPES.items() if known == shape), None)


def _shared_seconds(config: ModelConfig, deployment: Deployment, bucket: Bucket) -> float:
    """Returns the seconds beyond their bytes of a device's kernels for the shared expert; 0 without
    any. Raises ConfigError if they were counted for other numbers of rows."""
    ffn, tokens = deployment.ffn, bucket.tokens * deployment.attention.dp
    name = _name_of((config.d_model, config.moe.d_ff // ffn.instances, 1, 1, 1))
    alone = ffn.shared == "whole" or (exchange_of(config, deployment) == "alltoall" and ffn.tp == 1)
    counted = {case.partition(" ")[0] for case in _counts()}
    if name not in counted or ffn.weights != "fp8" or not alone:
        return 0.0
    rows = tokens * ffn.instances // (ffn.ep * ffn.tp)
    return sum(kernels.beyond_memory(_counted(f"{name} fp8_block_rows {rows}")))


def _beyond_bytes(case: str, work: float) -> float:
    """Returns a kernel's seconds beyond its bytes' time, for `work` positions or rows."""
    one = _counted(case)
    return sum(kernels.beyond_memory(one)) * work / float(one["work"])


def _counted(case: str, platform: str = "h200") -> dict[str, Any]:
    counts = _counts(platform)
    if case not in counts:
        raise ConfigError(f"no counts of {case!r}: {', '.join(counts)}")
    return counts[case]


def _counts(platform: str = "h200") -> dict[str, dict[str, Any]]:
    found = itertools.chain(*kernels.read_counts().values())
    return {one["case"]: one for one in found if one.get("platform", "h200") == platform}
