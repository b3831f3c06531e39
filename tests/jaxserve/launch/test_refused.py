"""Deployments, hardware and images that a target cannot start."""

import pytest

from jaxserve.launch.__main__ import main
from tests import golden

DOCKER = "qwen3-30b-a3b --hardware v6e --target docker"
REFUSED = [
    "demo --target gke-lws",
    "demo --target slurm",
    "demo-fleet --target gke-lws",
    "step3 --target gke-jobset",
    "step3-v6e --hardware v6e --target gke-lws --set ffn.ep=2",
    "step3 --hardware h100 --target kubernetes --set attention.dp=12 --set ffn.instances=1",
    "step3-fleet --target kubernetes --set ffn.ep=16",
    "demo --target kubernetes --set server.http_port=-1",
    "demo-fleet --hardware v6e --target gke-jobset",
    "demo --target kubernetes --models-bucket weights",
    "demo-fleet --target kubernetes --slices 2",
    "step3 --hardware h100 --target kubernetes --slices 2",
    "step3-v6e --hardware v6e --target gke-lws --slices 2",
    "step3-v6e --hardware v6f --target gke-lws",
    "demo --target kubernetes --slices 0",
    "demo --target kubernetes --name My_Model",
    f"demo --target systemd --name {'a' * 41}",
    "demo --target docker --image=",
    "step3-v6e --hardware v6e --target gke-lws --models-bucket gs://weights",
    "step3-v6e --hardware v6e --target systemd",
    "step3-prefill --target systemd",
    "demo-fleet --target systemd --set fleet.registry=kubernetes",
    "step3 --hardware h100 --target docker",
    "demo-fleet --hardware v6e --target docker",
    f"{DOCKER} --base-image python:3.12-slim",
    f"{DOCKER} --base-image python@sha256:{'5F' * 32}",
    f"{DOCKER} --image jaxserve@sha256:12",
    "demo --target systemd --base-image x",
    f"demo --target systemd --base-image x@sha256:{'5f' * 32}",
    "step3-v6e --hardware v6e --target cloud-tpu",
    "step3-v7x --hardware v7x --target cloud-tpu --model-path /mnt/x",
    "demo-fleet --hardware v6e --target cloud-tpu",
]


def test_each_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """`golden/launch/refused.txt` has them."""
    told = []
    for command in REFUSED:
        assert main(["--config", *command.split()]) == 2
        told.append(f"{command}\n    {capsys.readouterr().err}")
    golden.check("launch/refused.txt", "\n".join(told))
