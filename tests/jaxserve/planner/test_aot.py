"""Deployments compiled for TPU slices that are not there: Qwen3, and nightly the whole Step-3.

Each runs in its own process: libtpu looks at the environment once, and JAX's settings stay.
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


@pytest.mark.parametrize(
    ("topology", "config", "bucket", "devices", "layers", "gigabytes"),
    [
        ("v6e:2x4", "qwen3-30b-a3b", "32x64", 4, 48, (3.08, 58.0)),
        *(
            pytest.param(*given, 61, (14.07, 304.8), marks=pytest.mark.nightly)
            for given in [
                ("v6e:8x8", "step3-v6e", "32x32", 32),
                ("v7x:2x2x4", "step3-v7x", "128x32", 16),
            ]
        ),
    ],
)
def test_a_decode_bucket(topology, config, bucket, devices, layers, gigabytes):
    """Attention's weights are on every device, those of the FFN are divided."""
    config = f"configs/{config}.yaml"
    code, found, errors = compile_for(
        "--config", config, "--topology", topology, "--bucket", bucket
    )
    assert code == 0, errors
    assert found["failures"] == []
    kinds = ("dense", "moe") if layers == 61 else ("moe",)
    enter, *_ = kinds
    stages = [f"{stage}_{kind}" for stage in ("attend", "ffn") for kind in kinds]
    sampling = ["choose", "score", "logprobs"]
    names = [program["name"] for program in found["programs"]]
    assert sorted(names) == sorted([*sampling, f"enter_{enter}", *stages, "leave"])
    count = {program["name"]: program["layers"] for program in found["programs"]}
    assert sum(count[f"attend_{kind}"] for kind in kinds) + 1 == layers
    assert sum(count[f"ffn_{kind}"] for kind in kinds) == layers
    for program in found["programs"]:
        assert program["copied"] == 0, program["name"]
        crosses = program["name"].startswith("ffn")
        assert bool(program["collectives"].get("all-gather")) >= crosses
    attention, ffn = found["memory"]
    assert (attention["role"], attention["devices"]) == ("attention", devices)
    assert attention["weights"] / 1e9 == pytest.approx(gigabytes[0], rel=0.01)
    assert ffn["weights"] * devices / 1e9 == pytest.approx(gigabytes[1], rel=0.01)


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
