"""Step-3 with all of its 316 B parameters, compiled for TPU slices that are not there.

In processes of their own: libtpu looks at the environment once, and JAX's settings stay.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]


def compile_for(*arguments: str, timeout: float = 550) -> tuple[int, dict, str]:
    """Exit code, what --json printed, and the errors of `plan compile`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment["JAX_OPTIMIZATION_LEVEL"] = "O0"  # Two thirds of the time, for slower programs.
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve.plan", "compile", "--json", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("topology", "config", "bucket", "devices"),
    [
        ("v6e:8x8", "configs/step3-v6e.yaml", "32x32", 32),
        ("v7x:2x2x4", "configs/step3-v7x.yaml", "128x32", 16),
    ],
)
def test_a_decode_bucket_of_step3(topology, config, bucket, devices):
    code, found, errors = compile_for(
        "--config", config, "--topology", topology, "--bucket", bucket
    )
    assert code == 0, errors
    assert found["failures"] == []
    assert [program["name"] for program in found["programs"]] == [
        *("choose", "score", "logprobs"),
        *("enter_dense", "attend_dense", "attend_moe", "leave", "ffn_dense", "ffn_moe"),
    ]
    layers = {program["name"]: program["layers"] for program in found["programs"]}
    assert layers["attend_dense"] + layers["attend_moe"] + 1 == 61
    assert layers["ffn_dense"] + layers["ffn_moe"] == 61
    for program in found["programs"]:
        assert program["copied"] == 0, program["name"]
        crosses = {"ffn_dense", "ffn_moe"} & {program["name"]}
        assert bool(program["collectives"].get("all-gather")) >= bool(crosses)
    attention, ffn = found["memory"]
    assert (attention["role"], attention["devices"]) == ("attention", devices)
    assert attention["weights"] == pytest.approx(14.07e9, rel=0.01)
    assert ffn["weights"] * devices == pytest.approx(304.8e9, rel=0.01)


def test_a_slice_that_is_too_small():
    code, found, errors = compile_for(
        *("--config", "configs/step3-v6e.yaml", "--topology", "v6e:2x2", "--bucket", "32x32")
    )
    assert code == 2
    assert "= 64 devices, but there are 4" in errors
    assert found == {}


def test_topologies_that_nobody_knows():
    code, _, errors = compile_for("--config", "configs/step3-v6e.yaml", "--topology", "v99:2x2")
    assert code == 2
    assert "--topology 'v99:2x2'" in errors
