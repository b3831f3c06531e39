"""Compiles the Hopper cases of an op, for the `test_gpu_aot.py` of each."""

import functools
import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import gpu_resources

NEEDS_CUDA = pytest.mark.skipif(gpu_resources.plugin() is None, reason="needs JAX's CUDA wheels")
SECONDS = 7200
"""For all cases of an op; each takes some ten on one core."""
SHARED_MEMORY = 232_448


def printed_by(module, *arguments, **variables):
    """What a test module prints as JSON, run as a program of its own that compiles for GPUs."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@functools.cache
def kernels_of(op):
    """The kernels of all cases, compiled in one process: {case: [{"kernel": name, ...}, ...]}."""
    done = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.gpu_resources", "--json", "--op", op],
        env={key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPIL")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            kernel = json.loads(line)
            found.setdefault(kernel["case"], []).append(kernel)
    assert done.returncode == 0, f"{list(found)} compiled, then: {done.stderr[-2000:]}"
    return found


def check(op, case, names, registers):
    """The case compiled; nothing of its kernels is in slow memory or more than there is.

    Code that an earlier case has, too, is not compiled again.
    """
    found = kernels_of(op)[case]
    assert {kernel["kernel"] for kernel in found} <= set(names)
    for kernel in found:
        assert kernel["spilled_bytes"] == 0, kernel
        assert not kernel["losses"], kernel
        assert kernel["registers"] <= registers, kernel
        assert kernel["shared_memory"] <= SHARED_MEMORY, kernel
