"""What programs are compiled with on GPUs, of which there is none here."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.config.model import LayerKind
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.roles import program
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.compiler_options import compiler_options
from jaxserve.roles.ffn_programs import FFNPrograms
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import Program
from tests.jaxserve.roles.building import programs_of
from tests.jaxserve.roles.test_capacity import load

GRAPHS = "xla_gpu_enable_command_buffer"
KERNEL = "xla_gpu_experimental_ragged_all_to_all_use_device_kernel"


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_graphs():
    assert compiler_options("cuda", "off") == {GRAPHS: ""}
    nodes = compiler_options("gpu", "branches")[GRAPHS].split(",")
    assert {"FUSION", "CUSTOM_CALL", "CONDITIONAL", "WHILE"} <= set(nodes)


def test_between_processes_the_device_runs_the_exchange():
    assert compiler_options("cuda", ragged=True) == {
        KERNEL: True,
        "xla_gpu_ragged_all_to_all_mode": "COLLECTIVES_SYMMETRIC_MEMORY",
        "xla_gpu_enable_latency_hiding_scheduler": True,
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_within_a_process_nothing_is_asked_for_the_exchange(processes, monkeypatch):
    asked = []
    monkeypatch.setattr(program, "compiler_options", lambda *options: asked.append(options))
    monkeypatch.setattr(Program, "mapped", lambda self: self.body)
    devices = [SimpleNamespace(platform="cuda", process_index=n) for n in range(processes)]
    mesh = Mock(spec=Mesh, devices=np.asarray(devices, object))
    Program("exchange", lambda: 0, mesh, (), (), ragged=True).compile()
    assert asked == [("cuda", "default", processes > 1)]


def test_other_platforms_know_nothing_of_gpus():
    assert compiler_options("tpu", "branches", ragged=True) == {}
    assert not any("gpu" in name for name in compiler_options("cpu", "off", ragged=True))


@pytest.mark.parametrize("flag", [GRAPHS, KERNEL])
def test_xla_flags_win(monkeypatch, flag):
    monkeypatch.setenv("XLA_FLAGS", f"--{flag}=1")
    assert flag not in compiler_options("cuda", "off", ragged=True)


def test_programs_of_a_layer_have_no_graphs_and_the_sampler_has_branches():
    config, deployment = load("step3")
    attention = programs_of(AttentionPrograms, deployment, config, AbstractSubmeshes(deployment))
    bucket, kind = Bucket(128, 64), LayerKind("moe")
    assert attention.attend(bucket, kind).cuda_graphs == "off"
    assert attention.enter(bucket, kind).cuda_graphs == "off"
    assert attention.leave(bucket).cuda_graphs == "branches"


@pytest.mark.parametrize(("name", "ragged"), [("step3", False), ("step3-alltoall", True)])
def test_programs_that_exchange_rows(name, ragged):
    config, deployment = load(name)
    programs = programs_of(FFNPrograms, deployment, config, AbstractSubmeshes(deployment))
    moe, dense = programs.ffn(128, "moe"), programs.ffn(128, "dense")
    assert (moe.ragged, dense.ragged) == (ragged, False)
    assert moe.cuda_graphs == "off"
