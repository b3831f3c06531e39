"""What is compiled, how often, and who shares it; nothing is compiled here."""

from unittest.mock import Mock

import jax
import pytest

from jaxserve.checkpoint.step3 import step3_config
from jaxserve.config.model import LayerKind
from jaxserve.link.transport import DevicePutTransport
from jaxserve.mesh import Submeshes
from jaxserve.model import ModelTemplates
from jaxserve.pipeline.executables import afd_executables, colocated_executables, compile_all
from jaxserve.programs import AFDPrograms, ColocatedPrograms, Program
from jaxserve.step import Bucket
from tests.jaxserve import layouts

BUCKETS = [Bucket(8, 4), Bucket(8, 18), Bucket(24, 4), Bucket(24, 18)]


@pytest.fixture
def compiled(monkeypatch):
    """Names of the programs in the order of their compilation."""
    names = []

    def compile_(program):
        names.append(program.name)
        return Mock(spec=jax.stages.Compiled)

    monkeypatch.setattr(Program, "compile", compile_)
    return names


def templates(tmp_path, overrides):
    deployment = layouts.deployment(tmp_path, overrides)
    meshes = Submeshes(deployment)
    config = step3_config(layouts.SIZES.config())
    return ModelTemplates(config, deployment, meshes), deployment, meshes


def test_one_a_bucket_and_kind(compiled, tmp_path):
    programs = AFDPrograms(*templates(tmp_path, {}))
    afd_executables(programs, BUCKETS, "device_put")
    assert sorted(compiled) == sorted(
        ["enter_dense", "attend_dense", "attend_moe"] * 4  # every bucket
        + ["ffn_dense", "ffn_moe", "leave", "load", "choose", "score"] * 2  # every number of tokens
        + ["logprobs"]
    )


def test_buckets_of_equal_tokens_share_what_sees_no_pages(compiled, tmp_path):
    programs = AFDPrograms(*templates(tmp_path, {}))
    made = afd_executables(programs, BUCKETS, "device_put")
    assert list(made) == BUCKETS
    small, same, large = (made[bucket] for bucket in BUCKETS[:3])
    assert small.ffn == same.ffn
    assert small.leave is same.leave
    assert small.load is same.load
    assert small.dispatch["moe"] is same.dispatch["moe"]
    assert small.combine is same.combine
    assert small.enter is not same.enter
    assert small.attend[LayerKind("moe")] is not same.attend[LayerKind("moe")]
    assert small.combine is not large.combine
    assert small.sampling == same.sampling
    assert small.sampling.logprobs is large.sampling.logprobs
    assert small.sampling.choose is not large.sampling.choose
    assert isinstance(small.combine, DevicePutTransport)
    assert small.dispatch["moe"].piece == (8, 64 + 3 + 3)
    assert small.dispatch["dense"].piece == (8, 64)
    assert large.combine.piece == (24, 64)


def test_colocated_has_one_program_a_bucket(compiled, tmp_path):
    programs = ColocatedPrograms(*templates(tmp_path, layouts.COLOCATED))
    made = colocated_executables(programs, BUCKETS)
    assert sorted(compiled) == sorted(["step"] * 4 + ["choose", "score"] * 2 + ["logprobs"])
    assert list(made) == BUCKETS


def test_a_program_of_a_mesh_elsewhere_is_not_compiled(compiled, tmp_path, monkeypatch):
    programs = AFDPrograms(*templates(tmp_path, {}))
    monkeypatch.setattr(
        "jaxserve.pipeline.executables.has_local_devices",
        lambda mesh: mesh is programs.meshes.attention,
    )
    bucket = BUCKETS[0]
    wanted = {"here": programs.leave(bucket), "there": programs.ffn(bucket, "moe")}
    done = compile_all(wanted)
    assert compiled == ["leave"]
    assert done["there"] is None
    assert done["here"] is not None


def test_an_error_of_the_compiler_is_raised(tmp_path, monkeypatch):
    def fail(program):
        raise RuntimeError(f"cannot compile {program.name}")

    monkeypatch.setattr(Program, "compile", fail)
    programs = ColocatedPrograms(*templates(tmp_path, layouts.COLOCATED))
    with pytest.raises(RuntimeError, match="cannot compile"):
        colocated_executables(programs, BUCKETS[:1])
