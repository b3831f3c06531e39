"""Loading takes hardly more memory than what stays: measured by the kernel, in its own process."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.pallas_kernels.nightly import nightly
from tests.reference import tiny_sizes
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

MIB = 2**20
RUNTIME = 80 * MIB
"""More than what a process gets in load that is no weight, whatever the model's size: the programs
that fill weights in, their compiler, the allocator's reserves. 15 to 55 MiB were seen."""

SIZES = TinyStep3(moe_layers=(*range(1, 9),), **tiny_sizes.SIZES["larger step3"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_step3(tmp_path_factory.mktemp("large"), SIZES, shards=2)


LARGEST_BLOCK = 4 * (12 * 3 * 512 * 256 + 3 * 512 * 256)
"""Bytes of the experts of a layer."""

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux's accounts"
)


def report_of(*arguments):
    """Memory reported by a process that loads, or converts, and measures itself."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.jaxserve.checkpoint.loading", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    report = json.loads(run.stdout)
    print({name: round(size / MIB) for name, size in report.items()})
    return report


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory):
    """The same model, converted in a process that says what that took."""
    target = tmp_path_factory.mktemp("converted") / "model"
    return target, report_of("--convert", folder, target)


APART = ("mode=afd", "attention.dp=2", "ffn.ep=2", "ffn.tp=2")


@pytest.mark.parametrize(
    ("form", "overrides"),
    [
        ("files", APART),
        ("converted", ("mode=colocated",)),
        *nightly(("files", ("mode=afd",)), ("files", ("mode=colocated",))),
        *nightly(("converted", ("mode=afd",)), ("converted", APART)),
    ],
    ids=str,
)
def test_peak_while_loading(form, folder, converted, overrides):
    report = report_of(folder if form == "files" else converted[0], "dtype=float32", *overrides)
    assert report["weights"] > 180 * MIB
    assert report["stays"] <= report["weights"] + RUNTIME
    assert report["peak"] <= 1.2 * report["stays"]
    assert report["peak"] <= 1.2 * report["weights"] + RUNTIME


def test_peak_while_converting(converted):
    """A block is written while the next one is read."""
    _, report = converted
    assert report["weights"] > 180 * MIB
    assert report["peak"] <= 3 * LARGEST_BLOCK + 2 * RUNTIME
