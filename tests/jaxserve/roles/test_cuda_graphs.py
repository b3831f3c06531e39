"""What programs are compiled with on GPUs, of which there is none here."""

import pytest

from jaxserve.config.model import LayerKind
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.blocks import ModelTemplates
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.cuda_graphs import compiler_options
from jaxserve.roles.ffn_programs import FFNPrograms
from jaxserve.roles.layout import Bucket
from tests.jaxserve.roles.test_capacity import load

FLAG = "xla_gpu_enable_command_buffer"


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_options():
    assert compiler_options("off", "cuda") == {FLAG: ""}
    nodes = compiler_options("branches", "gpu")[FLAG].split(",")
    assert {"FUSION", "CUSTOM_CALL", "CONDITIONAL", "WHILE"} <= set(nodes)
    assert compiler_options("default", "cuda") is None


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_platforms_have_no_graphs(platform):
    assert compiler_options("off", platform) is None
    assert compiler_options("branches", platform) is None


def test_xla_flags_win(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{FLAG}=FUSION")
    assert compiler_options("off", "cuda") is None


def test_programs_of_a_layer_have_none_and_the_sampler_has_branches():
    config, deployment = load("step3")
    meshes = AbstractSubmeshes(deployment)
    templates = ModelTemplates(config, deployment, meshes)
    attention = AttentionPrograms(templates, deployment, meshes.attention)
    bucket, kind = Bucket(128, 64), LayerKind("moe")
    assert attention.attend(bucket, kind).cuda_graphs == "off"
    assert attention.enter(bucket, kind).cuda_graphs == "off"
    ffn = FFNPrograms(templates, deployment, meshes.ffn)
    assert ffn.ffn(128, "moe").cuda_graphs == "off"
    assert attention.leave(bucket).cuda_graphs == "branches"
