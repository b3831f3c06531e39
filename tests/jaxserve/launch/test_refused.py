"""Deployments, hardware and images that a target cannot start: each is refused with the reason."""

import pytest

from jaxserve.launch.__main__ import main

DOCKER = "qwen3-30b-a3b --hardware v6e --target docker"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("demo --target gke-lws", "is for a tpu, and attention.hardware and ffn.hardware are mis"),
        ("demo --target gke-lws", "write v5e, v5p, v6e or v7x there, or say it with --hardware"),
        (
            "demo --target slurm",
            "ffn.hardware are missing (whole); write a800",
        ),
        (
            "demo-fleet --target gke-lws",
            "for a tpu, and attention.hardware is missing (prefill)",
        ),
        ("step3 --target gke-jobset", "attention.hardware and ffn.hardware = h800 (whole); write"),
        (
            "step3-v6e --hardware v6e --target gke-lws --set ffn.ep=2",
            "48 chips of v6e: there are slices of 1, 4, 8, 16, 32, 64, 128, 256",
        ),
        (
            "step3 --hardware h100 --target kubernetes --set attention.dp=12 --set ffn.instances=1",
            "28 devices do not fill hosts of 8 NVIDIA H100 SXM",
        ),
        ("step3-fleet --target kubernetes --set ffn.ep=16", "ffn: 16 devices in one process"),
        ("demo --target kubernetes --set server.http_port=-1", "server.http_port = -1: probes"),
        ("demo-fleet --hardware v6e --target gke-jobset", "take gke-lws"),
        ("demo --target kubernetes --models-bucket weights", "only GKE mounts buckets"),
        ("demo-fleet --target kubernetes --slices 2", "of this deployment each worker"),
        ("step3 --hardware h100 --target kubernetes --slices 2", "only TPUs come in"),
        ("step3-v6e --hardware v6e --target gke-lws --slices 2", "take gke-jobset"),
        ("step3-v6e --hardware v6f --target gke-lws", "did you mean 'v6e'"),
        ("demo --target kubernetes --slices 0", "--slices 0: expected 1 or more"),
        ("demo --target kubernetes --name My_Model", "--name 'My_Model': needs 1 to 40"),
        (f"demo --target systemd --name {'a' * 41}", "needs 1 to 40 of a-z"),
        ("demo --target docker --image=", "--image '': is no image"),
        (
            "step3-v6e --hardware v6e --target gke-lws --models-bucket gs://weights",
            "--models-bucket 'gs://weights': is a bucket's name alone",
        ),
        # Hosts that cannot know their addresses
        ("step3-v6e --hardware v6e --target systemd", "16 hosts; say --leader HOST"),
        ("step3-prefill --target systemd", "a domain worker of 4 processes"),
        ("demo-fleet --target systemd --set fleet.registry=kubernetes", "give addresses"),
        # Hosts and images of containers
        ("step3 --hardware h100 --target docker", "takes 32 of h100, a host has 8"),
        ("demo-fleet --hardware v6e --target docker", "one process of a host has its"),
        (f"{DOCKER} --base-image python:3.12-slim", "needs its digest"),
        (f"{DOCKER} --base-image python@sha256:{'5F' * 32}", "needs its digest"),
        (f"{DOCKER} --image jaxserve@sha256:12", "is no image"),
        ("demo --target systemd --base-image x", "needs its digest"),
        (f"demo --target systemd --base-image x@sha256:{'5f' * 32}", "only --target docker"),
        # Runtimes on slices of Cloud TPU
        ("step3-v6e --hardware v6e --target cloud-tpu", "say --model-path"),
        ("step3-v7x --hardware v7x --target cloud-tpu --model-path /mnt/x", "v7x is rented on GKE"),
        ("demo-fleet --hardware v6e --target cloud-tpu", "take gke-lws"),
    ],
)
def test_what_no_target_can_start_is_refused(
    command: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", *command.split()]) == 2
    assert expected in capsys.readouterr().err
