"""Programs that compile for devices which are not there, for the tests that read their output."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import aot, gpu_resources

NEEDS_CUDA = pytest.mark.skipif(gpu_resources.plugin() is None, reason="needs JAX's CUDA wheels")
SECONDS = 7200
"""For all cases of an op; each takes some ten seconds on one core."""
COMPILED = [pytest.mark.gpu_aot, NEEDS_CUDA, pytest.mark.timeout(SECONDS)]


def lines_of(module, *arguments, env=None, limit=SECONDS):
    """The lines that a module prints, run as a program of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, f"after {done.stdout[-1000:]}: {done.stderr[-3000:]}"
    return done.stdout.splitlines()


def compiled_cases(op, generation, *names, limit=5000):
    """Output of `pallas_kernels.aot` for an op's cases on a TPU, by name; libtpu has its own
    settings, in a process of its own."""
    pytest.importorskip("libtpu")
    command = "pallas_kernels.aot", op, generation, *names
    lines = lines_of(*command, env=aot.environment(), limit=limit)
    return {one["case"]: one for one in (json.loads(line) for line in lines if line[:1] == "{")}


def printed_by(module, *arguments, **variables):
    """JSON printed by a test module, run as a program that compiles for GPUs."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | variables
    return json.loads("".join(lines_of(module, *arguments, env=env)))
