"""Compiler options of programs."""

import functools
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.module import rms_norm
from jaxserve.roles import program
from jaxserve.roles.ffn import FFNPrograms
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import REPLICATED, Program, compiler_options
from pallas_kernels.attention.api import paged_attention
from tests.jaxserve.roles.building import programs_of
from tests.jaxserve.roles.test_capacity import load

WIDTH, PAGES, PAGE_SIZE = 512, 12, 16


def _body(page_bucket, window, x, pages, position):
    """A norm, and attention of 8 heads to blocks of one sequence's pages: all that is summed along
    rows in a step and is not a product."""
    normed = rms_norm(x, jnp.ones(WIDTH), 1e-6)
    table = jnp.arange(page_bucket, dtype=jnp.int32)[None] % PAGES
    mine = jnp.zeros(x.shape[0], jnp.int32)
    queries = normed.reshape(-1, 8, 64)
    attended, _ = paged_attention(
        queries, pages, pages, table, mine, position, scale=0.125, window=window
    )
    return normed, attended


@pytest.mark.parametrize(
    ("other_rows", "page_bucket", "window"),
    [
        *((other_rows, page_bucket, 40) for other_rows, page_bucket in ((1, 12), (7, 12), (2, 64))),
        *((40, 5, window) for window in (0, 7, 40, 150, 1000)),
    ],
)
def test_a_row_is_the_same_in_any_step_on_cpus(other_rows, page_bucket, window):
    """XLA:CPU would begin to sum otherwise at 8 rows of 512, and at 4 of 8 heads' 128 scores."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(41, WIDTH)).astype(np.float32)
    pages = rng.normal(size=(PAGES, 2, PAGE_SIZE, 64)).astype(np.float32)
    seen = min(PAGES, page_bucket) * PAGE_SIZE
    position = rng.integers(1, seen, 41).astype(np.int32)
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("dp", "tp"))
    found = []
    for count, bucket in ((1, PAGES), (1 + other_rows, page_bucket)):
        arguments = rows[-count:], pages, position[-count:]
        everywhere = NamedSharding(mesh, REPLICATED)
        shapes = tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere) for a in arguments
        )
        body = functools.partial(_body, bucket, window)
        program = Program("rows", body, mesh, shapes, (REPLICATED,) * 2)
        found.append([np.asarray(made[-1]) for made in program.compile()(*arguments)])
    for alone, among in zip(*found, strict=True):
        assert np.abs(alone).max() > 0
        np.testing.assert_array_equal(among, alone)


GRAPHS = "xla_gpu_enable_command_buffer"
KERNEL = "xla_gpu_experimental_ragged_all_to_all_use_device_kernel"


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_graphs():
    assert compiler_options("cuda", "off") == {GRAPHS: ""}
    nodes = compiler_options("gpu", "branches")[GRAPHS].split(",")
    assert {"FUSION", "CUSTOM_CALL", "CONDITIONAL", "WHILE"} <= set(nodes)


def test_between_processes_the_device_runs_the_exchange_and_messages_are_received_once():
    assert compiler_options("cuda", paired=True) == {"xla_gpu_memory_limit_slop_factor": 1000}
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
    assert asked == [("cuda", "default", processes > 1, False)]


def test_other_platforms_know_nothing_of_gpus():
    assert compiler_options("tpu", "branches", ragged=True, paired=True) == {}
    assert not any("gpu" in name for name in compiler_options("cpu", "off", True, True))


@pytest.mark.parametrize("flag", [GRAPHS, KERNEL])
def test_xla_flags_win(monkeypatch, flag):
    monkeypatch.setenv("XLA_FLAGS", f"--{flag}=1")
    assert flag not in compiler_options("cuda", "off", ragged=True)


@pytest.mark.parametrize(("name", "ragged"), [("step3", False), ("step3-alltoall", True)])
def test_programs_that_exchange_rows(name, ragged):
    config, deployment = load(name)
    programs = programs_of(FFNPrograms, deployment, config, AbstractSubmeshes(deployment))
    moe, dense = (programs.ffn(Bucket(128, 1), config.layer(n).ffn) for n in (4, 0))
    assert (moe.ragged, dense.ragged) == (ragged, False)
    assert moe.cuda_graphs == "off"
