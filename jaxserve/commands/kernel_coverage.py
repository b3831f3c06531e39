"""Finds the programs of a deployment that have no kernel on given hardware.

Called by `serve --check`. Programs are traced for that hardware's kernels on meshes without
devices; nothing is compiled, and no backend is started.
"""

from collections.abc import Iterator, Mapping

import jax
import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig, platform_of
from jaxserve.config.topology import Role
from jaxserve.errors import ConfigError
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.attention_programs import LayerPrograms, attention_executables
from jaxserve.roles.colocated import ColocatedPrograms, colocated_executables
from jaxserve.roles.compilation import Program, wanted
from jaxserve.roles.ffn import FFNPrograms, ffn_executables
from jaxserve.roles.layout import deployment_buckets
from pallas_kernels.coverage import collect_fallbacks
from pallas_kernels.target import target_of, use_target

OPTIONS = ("choose", "logprobs", "score", "look_up", "resolve", "end")
"""Programs in which no op has a kernel on any platform."""

PLATFORMS = ("NVIDIA H200", "TPU v5 lite", "TPU v6 lite", "TPU7x")
"""Kinds of devices with kernels. H200 stands for all Hopper GPUs, which share their kernels."""


def kernel_gaps(
    config: ModelConfig, deployment: Deployment, device_kinds: Mapping[Role, str], steps: int = 2
) -> tuple[list[str], list[str]]:
    """Finds operations of a deployment's programs that no kernel covers.

    Args:
      device_kinds: device kind, as JAX names it, of each role whose hardware is known.
      steps: 2: check the largest and the smallest step; 1: only the largest, in half the time.

    Returns:
      Descriptions of what runs in plain XLA instead, and what that costs, without duplicates; and
      descriptions of what does not run at all.
    """
    slow: list[str] = []
    impossible: list[str] = []
    for role, kind in device_kinds.items():
        platform = platform_of(kind)
        config = msgspec.structs.replace(config, platform=platform)
        target = target_of(platform, kind)
        with use_target(target), collect_fallbacks() as found:
            try:
                programs = list(_programs(config, deployment, role, steps))
            except ConfigError as error:  # the configuration runs on CPUs only
                impossible.append(f"{role}: {error}")
                continue
        slow += [f"{role}: {fallback}" for fallback in found]
        for program in programs:
            with use_target(target), collect_fallbacks() as found:
                try:
                    jax.eval_shape(program.mapped(), *program.arguments)
                except NotImplementedError as error:
                    impossible.append(f"{role}: {error}")
            slow += [f"{role}: {fallback}" for fallback in found]
    return list(dict.fromkeys(slow)), list(dict.fromkeys(impossible))


def _programs(
    config: ModelConfig, deployment: Deployment, role: Role, steps: int
) -> Iterator[Program]:
    """Yields a role's programs for its largest step and, with `steps` 2, its smallest step."""
    meshes = AbstractSubmeshes(deployment)
    templates = ModelTemplates(config, deployment, meshes)
    sizes = deployment_buckets(deployment)
    buckets = list(dict.fromkeys([sizes[-1], sizes[0]][:steps]))
    if role == "ffn":
        programs = FFNPrograms(templates, deployment, meshes.ffn)
        tokens = [bucket.tokens for bucket in buckets]
        yield from wanted(ffn_executables, programs, tokens).values()
        return
    if deployment.topology.has("colocated"):
        whole = ColocatedPrograms(templates, deployment, meshes.attention)
        found = wanted(colocated_executables, whole, buckets)
    else:
        own = LayerPrograms(templates, deployment, meshes.attention)
        found = wanted(attention_executables, own, buckets)
    yield from (program for key, program in found.items() if key.name not in OPTIONS)
