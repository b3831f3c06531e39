"""What is compiled, how often, and who shares it; nothing is compiled here."""

from unittest.mock import Mock

import jax
import numpy as np
import pytest

from jaxserve.config.model import LayerKind
from jaxserve.roles.attention import attention_executables
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.colocated import colocated_executables
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.compilation import compile_all, compile_steps, hot_call, wanted
from jaxserve.roles.ffn import ffn_executables
from jaxserve.roles.ffn_programs import FFNPrograms
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import Program
from tests.jaxserve import layouts
from tests.jaxserve.roles.building import programs_of

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


def attention_of(tmp_path):
    return programs_of(AttentionPrograms, layouts.deployment(tmp_path, {}))


def ffn_of(tmp_path):
    return programs_of(FFNPrograms, layouts.deployment(tmp_path, {}))


def executables(steps, *arguments):
    return compile_steps(steps, *arguments)[0]


def test_one_a_bucket_and_kind(compiled, tmp_path):
    compile_all(
        wanted(attention_executables, attention_of(tmp_path), BUCKETS)
        | wanted(ffn_executables, ffn_of(tmp_path), [8, 24, 8, 24])
    )
    assert sorted(compiled) == sorted(
        ["enter_dense", "attend_dense", "attend_moe"] * 4  # every bucket
        + ["ffn_dense", "ffn_moe", "leave", "choose", "score"] * 2  # every number of tokens
        + ["logprobs"]
    )


def test_buckets_of_equal_tokens_share_what_sees_no_pages(compiled, tmp_path):
    made = executables(attention_executables, attention_of(tmp_path), BUCKETS)
    assert list(made) == BUCKETS
    small, same, large = (made[bucket] for bucket in BUCKETS[:3])
    assert small.leave is same.leave
    assert small.enter is not same.enter
    assert small.attend[LayerKind("moe")] is not same.attend[LayerKind("moe")]
    assert small.leave is not large.leave
    assert small.sampling == same.sampling
    assert small.sampling.logprobs is large.sampling.logprobs
    assert small.sampling.choose is not large.sampling.choose


def test_ffn_programs_by_kind_and_size(compiled, tmp_path):
    made = executables(ffn_executables, ffn_of(tmp_path), [8, 24])
    sizes = [(1, 8), (1, 24)]
    assert sorted(made) == [(kind, size) for kind in ("dense", "moe") for size in sizes]


def test_colocated_has_one_program_a_bucket(compiled, tmp_path):
    programs = programs_of(ColocatedPrograms, layouts.deployment(tmp_path, layouts.COLOCATED))
    bound = executables(colocated_executables, programs, BUCKETS)
    assert sorted(compiled) == sorted(["step"] * 4 + ["choose", "score"] * 2 + ["logprobs"])
    assert list(bound) == BUCKETS


def test_an_error_of_the_compiler_is_raised(tmp_path, monkeypatch):
    def fail(program):
        raise RuntimeError(f"cannot compile {program.name}")

    monkeypatch.setattr(Program, "compile", fail)
    with pytest.raises(RuntimeError, match="cannot compile"):
        executables(attention_executables, attention_of(tmp_path), BUCKETS[:1])


def test_hot_call_returns_what_the_program_does():
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), np.int32)).compile()
    call = hot_call(compiled)
    assert call is not compiled
    assert [int(call(np.int32(n))) for n in (1, 2)] == [2, 3]
    assert hot_call(compiled) is call


def test_hot_call_where_jax_has_no_private_one():
    compiled = Mock(spec=jax.stages.Compiled, _call=None)
    compiled._executable = object()
    assert hot_call(compiled) is compiled
