"""Loads or converts a folder in its own process, and prints how much memory that took.

Run by `test_memory.py` as `python -m tests.jaxserve.checkpoint.loading FOLDER KEY=VALUE…`, or with
`--convert FOLDER TARGET`. The kernel keeps the account: `VmHWM` is the largest resident size since
it was reset. It counts all pages in memory, those of mapped files too.
"""

import gc
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import yaml

from jaxserve.checkpoint.conversion import convert
from tests.jaxserve.checkpoint.opened import Opened


def resident(line: str) -> int:
    """`VmRSS` or `VmHWM`, bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(s.split()[1]) for s in status.splitlines() if s.startswith(line)) * 1024


def main() -> None:
    if sys.argv[1] == "--convert":
        return converting(*sys.argv[2:])
    folder, *settings = sys.argv[1:]
    pairs = [setting.split("=") for setting in settings]
    overrides = {key: yaml.safe_load(value) for key, value in pairs}
    opened = Opened(folder, overrides, on_cpus=True)
    before = start()
    leaves = jax.block_until_ready(opened.leaves())
    say(before, sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards))


def converting(folder: str, target: str) -> None:
    """Converts the folder."""
    import orbax.checkpoint  # noqa: F401  (it is large)

    before = start()
    convert(folder, target)
    say(before, sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")))


def start() -> int:
    """Resets the kernel's account; returns the resident size."""
    jax.block_until_ready(jax.jit(jnp.zeros_like)(jnp.ones(4)))  # loads the compiler
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
