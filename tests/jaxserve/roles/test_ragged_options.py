"""What ragged all-to-alls between processes are compiled with on GPUs, of which there is none."""

import pytest

from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.blocks import ModelTemplates
from jaxserve.roles.ffn_programs import FFNPrograms
from jaxserve.roles.ragged_options import ragged_options
from tests.jaxserve.roles.test_capacity import load

KERNEL = "xla_gpu_experimental_ragged_all_to_all_use_device_kernel"


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_between_processes_the_device_runs_it():
    assert ragged_options(2, "cuda") == {
        KERNEL: True,
        "xla_gpu_ragged_all_to_all_mode": "COLLECTIVES_SYMMETRIC_MEMORY",
        "xla_gpu_enable_latency_hiding_scheduler": True,
    }


def test_elsewhere_nothing_is_asked_for():
    assert ragged_options(1, "cuda") == {}
    assert ragged_options(2, "cpu") == {}
    assert ragged_options(2, "tpu") == {}


def test_xla_flags_win(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{KERNEL}=false")
    assert KERNEL not in ragged_options(2, "cuda")


@pytest.mark.parametrize(("name", "ragged"), [("step3", False), ("step3-alltoall", True)])
def test_programs_that_have_some(name, ragged):
    config, deployment = load(name)
    meshes = AbstractSubmeshes(deployment)
    programs = FFNPrograms(ModelTemplates(config, deployment, meshes), deployment, meshes.ffn)
    assert programs.ffn(128, "moe").ragged == ragged
    assert not programs.ffn(128, "dense").ragged
