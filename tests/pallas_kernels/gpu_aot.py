"""Programs that compile for GPUs which are not there, for the tests that read what they print."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import gpu_resources

NEEDS_CUDA = pytest.mark.skipif(gpu_resources.plugin() is None, reason="needs JAX's CUDA wheels")
SECONDS = 7200
"""For all cases of an op; each takes some ten seconds on one core."""


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
