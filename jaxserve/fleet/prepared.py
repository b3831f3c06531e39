"""The part of a worker's start that needs neither weights nor another worker, done in advance.

Called by a spare of the local launcher (`launch/local/spare.py`), with the arguments and variables
of a process that may die. It takes the devices of the process, joins the other spares of the
runtime with `jax.distributed`, and compiles the programs of the role. `serve` gets the result as an
argument if the process starts here later.

Attention and ffn workers over `link.transport: pull` are prepared, and on CPUs alone: two processes
cannot share an accelerator.
"""

import argparse
import gc
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from jaxserve.roles.attention_programs import LayerPrograms, attention_executables
from jaxserve.roles.compilation import compile_steps, use_compilation_cache
from jaxserve.roles.ffn import FFNPrograms, ffn_executables
from jaxserve.roles.layout import deployment_buckets, token_sizes

MODULES = {0: "jaxserve.commands.serving", 1: "jaxserve.commands.following"}
"""Modules that the first and the other processes of a domain import, beside the link's."""


class Prepared(NamedTuple):
    """Programs of a role, compiled for a runtime that may start in this process later."""

    runtime: RoleRuntime
    executables: Any

    def given_to(self, runtime: RoleRuntime) -> RoleRuntime:
        """Returns the runtime with the programs, if it has the role, model, deployment and devices
        for which they were compiled. The code and JAX's options are those of this process."""
        own, other = (
            (one.role, one.config, one.deployment, one.mesh) for one in (self.runtime, runtime)
        )
        return runtime._replace(executables=self.executables) if own == other else runtime


def prepare(given: Sequence[str]) -> Prepared | None:
    """Prepares the process with these arguments; returns None where that is not supported.

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
        return None
    if deployment.ffn.instances > 1 or choose_platform() != "cpu":
        return None
    role: Role = "attention" if process.role == "attention" else "ffn"
    if role == "attention":
        importlib.import_module(MODULES[min(process.process_id, 1)])
    ports.use(deployment.cluster.ports)
    initialise(process, deployment)
    use_compilation_cache()
    runtime = RoleRuntime.of(*read_model(deployment), deployment, role)
    given_to_all = runtime.config, deployment, AbstractSubmeshes(deployment)
    gc.freeze()  # as `open_role` does
    if role == "attention":
        attention = LayerPrograms(AttentionTemplates(*given_to_all), deployment, runtime.mesh)
        buckets = deployment_buckets(deployment)
        return Prepared(runtime, compile_steps(attention_executables, attention, buckets))
    ffn = FFNPrograms(FFNTemplates(*given_to_all), deployment, runtime.mesh)
    return Prepared(runtime, compile_steps(ffn_executables, ffn, token_sizes(deployment)))
