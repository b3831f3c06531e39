"""Everything of a worker's start that needs neither its weights nor another worker, in advance.

Called by a spare of the local launcher (`launch/local/spare.py`), with the arguments and variables
of a process that may die. It takes the devices of the process, joins the other spares of the
runtime with `jax.distributed`, and compiles the programs of the role. If the process later starts
here, `compile_steps` finds them.

This is done for attention and ffn workers over `link.transport: pull`, and on CPUs alone: two
processes cannot share an accelerator.
"""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from jaxserve import ports
from jaxserve.checkpoint.int8_products import read_model
from jaxserve.config.command_line import add_deployment_arguments, read_deployment
from jaxserve.config.topology import Role
from jaxserve.fleet.arguments import add_arguments, from_arguments
from jaxserve.fleet.devices import initialise
from jaxserve.fleet.hardware import choose_platform
from jaxserve.fleet.role_runtime import RoleRuntime
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.blocks import AttentionTemplates
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.roles.attention_programs import AttentionPrograms, attention_executables
from jaxserve.roles.compilation import compile_steps, prepared, use_compilation_cache
from jaxserve.roles.ffn import FFNPrograms, ffn_executables
from jaxserve.roles.layout import deployment_buckets, token_sizes

MODULES = {0: "jaxserve.commands.serving", 1: "jaxserve.commands.following"}
"""Modules that the first and the other processes of a domain import, beside the link's."""


def prepare(given: Sequence[str]) -> None:
    """Prepares the process with these arguments, if it can be.

    Raises:
      ConfigError, CheckpointError: the process could not start either.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_deployment_arguments(parser)
    add_arguments(parser)
    options, _ = parser.parse_known_args(given)
    process = from_arguments(options)
    deployment = read_deployment(options.config, options.model, options.set)
    if process.role not in ("attention", "ffn") or not deployment.topology.crosses_runtimes:
        return
    if deployment.ffn.instances > 1 or choose_platform() != "cpu":
        return
    role: Role = "attention" if process.role == "attention" else "ffn"
    if role == "attention":
        importlib.import_module(MODULES[min(process.process_id, 1)])
    ports.use(deployment.cluster.ports)
    initialise(process, deployment)
    use_compilation_cache()
    runtime = RoleRuntime.of(*read_model(deployment), deployment, role)
    if role == "attention":
        _compile(
            *(attention_executables, AttentionPrograms, AttentionTemplates),
            *(runtime, deployment_buckets(deployment)),
        )
    else:
        _compile(*(ffn_executables, FFNPrograms, FFNTemplates), *(runtime, token_sizes(deployment)))


def _compile(
    steps: Any, programs_of: Any, templates_of: Any, runtime: RoleRuntime, sizes: Sequence[Any]
) -> None:
    """Compiles the steps of a role."""
    config, deployment = runtime.config, runtime.deployment
    templates = templates_of(config, deployment, AbstractSubmeshes(deployment))
    programs = programs_of(templates, deployment, runtime.mesh)
    origin = steps, config, runtime.mesh, sizes, deployment
    prepared.append((origin, compile_steps(steps, programs, sizes)))
