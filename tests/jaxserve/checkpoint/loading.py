"""Loads a folder in a process of its own, and says what that took at most and what stays.

Run by `test_memory.py` as `python -m tests.jaxserve.checkpoint.loading FOLDER KEY=VALUE…`, or with
`--convert FOLDER TARGET`.
The kernel keeps the account: `VmHWM`, the largest resident size since it was reset. That counts all
that the process has in memory, pages of mapped files too.
"""

import gc
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.conversion import convert
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.store import open_checkpoint
from jaxserve.config.load import load_deployment
from jaxserve.mesh import Submeshes
from jaxserve.model.blocks import ModelTemplates
from jaxserve.model.float_matrices import placed
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.colocated_weights import ColocatedWeights
from tests.jaxserve.both_roles import load_both


def resident(line: str) -> int:
    """`VmRSS` or `VmHWM`, bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(s.split()[1]) for s in status.splitlines() if s.startswith(line)) * 1024


def main() -> None:
    if sys.argv[1] == "--convert":
        return converting(*sys.argv[2:])
    folder, *overrides = sys.argv[1:]
    deployment = load_deployment(folder, overrides)
    config, names = read_config(folder)
    meshes = Submeshes(deployment)
    templates = ModelTemplates(placed(config, meshes.ffn), deployment, meshes)
    before = start()
    checkpoint = open_checkpoint(folder, names)
    if deployment.mode == "colocated":
        programs = ColocatedPrograms(templates, deployment, meshes.attention)
        weights = list(ColocatedWeights(checkpoint, names, programs).flat)
    else:
        weights = load_both(checkpoint, names, templates, deployment, meshes).leaves
    jax.block_until_ready(weights)
    say(before, sum(s.data.nbytes for leaf in weights for s in leaf.addressable_shards))


def converting(folder: str, target: str) -> None:
    """Converts the folder."""
    import orbax.checkpoint  # noqa: F401  (it is large)

    before = start()
    convert(folder, target)
    say(before, sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")))


def start() -> int:
    """Resets the kernel's account; gives what is resident."""
    jax.block_until_ready(jax.jit(jnp.zeros_like)(jnp.ones(4)))  # the compiler is there already
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    return before


def say(before: int, weights: int) -> None:
    """Prints the account."""
    peak = resident("VmHWM")
    gc.collect()
    report = {"peak": peak - before, "stays": resident("VmRSS") - before, "weights": weights}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
