"""Which programs are compiled, how often, and which are shared; nothing is compiled here."""

import functools
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache as private
from jax._src import distributed, monitoring
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding

from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.module import rms_norm
from jaxserve.roles import compilation
from jaxserve.roles.attention_programs import LayerPrograms, attention_executables
from jaxserve.roles.colocated import ColocatedPrograms, colocated_executables
from jaxserve.roles.compilation import (
    REPLICATED,
    Program,
    StepCompiler,
    WholeEntries,
    compile_all,
    compiler_options,
    hot_call,
    use_compilation_cache,
    wanted,
)
from jaxserve.roles.ffn import FFNPrograms, ffn_executables
from jaxserve.roles.layout import Bucket
from jaxserve.roles.sampling import SamplingExecutables
from jaxserve.roles.step_plan import StepPlan
from pallas_kernels.attention.api import paged_attention
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve.roles.building import programs_of
from tests.jaxserve.roles.test_capacity import load
from tests.jaxserve.storage.conftest import objects as objects

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
    return programs_of(LayerPrograms, layouts.deployment(tmp_path, {}))


def ffn_of(tmp_path):
    return programs_of(FFNPrograms, layouts.deployment(tmp_path, {}))


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


@pytest.fixture
def few(compiled, tmp_path):
    """Compiles a part of three buckets of tokens and two of pages."""
    few = {"scheduler.compile_first": "few", "scheduler.token_buckets": [8, 16, 24]}
    few |= {"scheduler.page_buckets": [4, 18], **layouts.COLOCATED}
    programs = programs_of(ColocatedPrograms, layouts.deployment(tmp_path, few))
    return StepCompiler(colocated_executables, programs, SamplingExecutables._fields)


def test_programs_that_suffice_come_first_and_the_others_while_it_serves(compiled, few):
    """The largest steps come next: until then prompts are cut to the first."""
    assert [*few.executables] == [Bucket(8, 18)]
    assert (compiled, few.takes_options, few.token_budget) == (["step"], False, 8)
    plan, made = StepPlan(0, 0, Bucket(8, 4), b"", b""), []
    assert few.fitted(plan).bucket == Bucket(8, 18)
    few.start(lambda: made.append((few.token_budget, len(few.executables))), made.append)
    few._thread.join(60)
    assert made == [(8, 2), (24, 4), (24, 6)]
    assert few.takes_options
    assert sorted(compiled) == sorted(["step"] * 6 + ["choose", "score"] * 3 + ["logprobs"])
    assert None not in {one for bound in few.executables.values() for one in bound.sampling}
    assert few.fitted(plan) is plan


def test_a_program_that_cannot_be_compiled_later_is_told_at_once(few, monkeypatch):
    monkeypatch.setattr(Program, "compile", Mock(side_effect=MemoryError("no room for choose")))
    told = []
    few.start(lambda: told.append("made"), told.append)
    few._thread.join(60)
    assert [str(error) for error in told] == ["compilation after the start: no room for choose"]
    assert not few.takes_options


SIZES = [8, 64, 16, 128, 24, 96, 32, 48]


def test_every_process_compiles_programs_of_drafts_in_the_order_of_the_buckets(tmp_path):
    overrides = {**layouts.COLOCATED, "speculative.method": "ngram"}
    programs = programs_of(ColocatedPrograms, layouts.deployment(tmp_path, overrides))
    buckets = [Bucket(tokens, 18, drafts) for tokens in SIZES for drafts in (0, 3)]
    keys = wanted(colocated_executables, programs, buckets)
    asked = [(key.name, key.bucket.tokens) for key in keys if key.name in ("resolve", "draft")]
    assert asked == [(name, tokens) for tokens in SIZES for name in ("resolve", "draft")]


def test_hot_call_returns_what_the_program_does_or_the_program():
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), np.int32)).compile()
    call = hot_call(compiled)
    assert call is not compiled
    assert [int(call(np.int32(n))) for n in (1, 2)] == [2, 3]
    assert hot_call(compiled) is call
    compiled = Mock(spec=jax.stages.Compiled, _call=None, _executable=object())  # another JAX's
    assert hot_call(compiled) is compiled


OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def options():
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("options")
class TestPlace:
    @pytest.mark.parametrize("place", ["", ".cache"])
    def test_is_private_to_the_user(self, tmp_path, monkeypatch, place):
        """An empty variable does not mean the working directory."""
        monkeypatch.setenv("XDG_CACHE_HOME", place and str(tmp_path / place))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        use_compilation_cache()
        folder = tmp_path / ".cache/jaxserve" / f"xla-{jax.__version__}"
        assert jax.config.jax_compilation_cache_dir == str(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0

    @pytest.mark.parametrize("seconds", [None, "7.0"])
    def test_or_where_jax_was_told(self, tmp_path, monkeypatch, seconds):
        """Short programs are kept there, too, unless JAX was told otherwise."""
        monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
        if seconds:
            monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", seconds)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
        use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
        kept = 7.0 if seconds else 0.0
        assert jax.config.jax_persistent_cache_min_compile_time_secs == kept

    def test_none_where_nothing_can_be_written(self, tmp_path, monkeypatch, caplog):
        (tmp_path / "jaxserve").write_text("a file where the folder should be")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir is None
        assert "no compilation cache" in caplog.text


@pytest.fixture
def folder(tmp_path, options):
    """A cache of its own, for every program, with which JAX starts afresh."""
    for name, value in zip(OPTIONS, (str(tmp_path), 0.0, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    use_compilation_cache()
    yield tmp_path
    compilation_cache.reset_cache()


@pytest.mark.parametrize("left", [0, 1, 100, -1], ids=["nothing", "a byte", "100", "all but one"])
def test_a_truncated_entry_is_replaced(folder, left, caplog):
    def compile_once():
        jax.clear_caches()
        return jax.jit(lambda x: 3 * x + left).lower(jnp.ones(3)).compile()

    compile_once()
    files = list(folder.glob("*-cache"))
    whole = {file: file.read_bytes() for file in files}
    assert whole
    for file in files:
        file.write_bytes(whole[file][:left])
    assert compile_once()(jnp.ones(3)).tolist() == [3.0 + left] * 3
    assert caplog.text.count("cannot be read") == len(files)
    assert {file.name: len(file.read_bytes()) > 100 for file in folder.iterdir()} == {
        file.name: True for file in files
    }, "all were made again, and nothing else is left"
    caplog.clear()
    compile_once()
    assert caplog.text == ""


def test_a_writer_that_dies_leaves_no_entry(tmp_path):
    """SIGKILL in the middle of a write."""
    code = golden.text("roles/writer_that_dies.txt")
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=120)
    assert died.returncode == -9
    assert WholeEntries(str(tmp_path), max_size=-1).get("key") is None
    assert len(list(tmp_path.iterdir())) == 1


def test_a_follower_keeps_its_own(folder, monkeypatch):
    """Process 0 compiles none of the other role's programs."""
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    jax.clear_caches()
    jax.jit(lambda x: 5 * x).lower(jnp.ones(3)).compile()
    (entry,) = [file for file in folder.glob("*-cache") if "lambda" in file.name]
    before = entry.stat().st_mtime_ns
    jax.clear_caches()
    jax.jit(lambda x: 5 * x).lower(jnp.ones(3)).compile()
    assert entry.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("place", "first", "writes"),
    [("", 3, True), ("", 0, True), ("s3://models", 0, True), ("s3://models", 3, False)],
)
def test_who_writes_an_entry(folder, monkeypatch, place, first, writes):
    """In a folder all do, as entries appear whole; in a bucket the first that runs the program."""
    written = []
    monkeypatch.setattr(private, "put_executable_and_time", lambda *args: written.append(args[1]))
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(compilation._running, "first", first, raising=False)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    jax.config.update("jax_compilation_cache_dir", place or str(folder))
    for seconds in (0.9, 1.0):
        compilation._write("key", seconds, f"ffn_moe {seconds}", None, None)
    assert written == ["ffn_moe 1.0"] * writes


@pytest.fixture
def bucket(folder, objects):
    """The cache in a bucket."""
    jax.config.update("jax_compilation_cache_dir", "s3://models/cache")
    compilation_cache.reset_cache()
    use_compilation_cache()
    return objects


def test_a_second_host_compiles_nothing(bucket, caplog):
    """The second host finds what the first one wrote; a damaged entry is made again."""
    hits = []

    def listener(event, **_):
        if event.endswith("cache_hits"):
            hits.append(event)

    monitoring.register_event_listener(listener)

    def compile_once():
        jax.clear_caches()
        compilation_cache.reset_cache()  # as a process that starts
        return jax.jit(lambda x: 7 * x).lower(jnp.ones(3)).compile()

    try:
        compile_once()
        (name,) = [name for name in bucket.files if "lambda" in name]
        assert name.startswith("cache/")
        hits.clear()
        assert compile_once()(jnp.ones(3)).tolist() == [7.0] * 3
        assert len(hits) >= 1
        assert len([name for name in bucket.files if "lambda" in name]) == 1
        whole = bucket.files[name]
        bucket.files[name] = whole[:50]
        compile_once()
        assert "cannot be read" in caplog.text
        assert len(bucket.files[name]) > 100
    finally:
        monitoring.unregister_event_listener(listener)


def test_a_bucket_that_refuses_only_costs_time(bucket, caplog):
    bucket.refuses = True
    jax.clear_caches()
    assert jax.jit(lambda x: 9 * x).lower(jnp.ones(3)).compile()(jnp.ones(3)).tolist() == [9.0] * 3
    assert "compilation cache: s3://models/cache" in caplog.text
    assert "no permission" in caplog.text


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
    assert compiler_options("cuda", several=True) == {"xla_gpu_memory_limit_slop_factor": 1000}
    assert compiler_options("cuda", ragged=True) == {
        KERNEL: True,
        "xla_gpu_ragged_all_to_all_mode": "COLLECTIVES_SYMMETRIC_MEMORY",
        "xla_gpu_enable_latency_hiding_scheduler": True,
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_within_a_process_nothing_is_asked_for_the_exchange(processes, monkeypatch):
    asked = []
    monkeypatch.setattr(compilation, "compiler_options", lambda *options: asked.append(options))
    monkeypatch.setattr(Program, "mapped", lambda self: self.body)
    devices = [SimpleNamespace(platform="cuda", process_index=n) for n in range(processes)]
    mesh = Mock(spec=Mesh, devices=np.asarray(devices, object))
    Program("exchange", lambda: 0, mesh, (), (), ragged=True).compile()
    assert asked == [("cuda", "default", processes > 1, False)]


def test_other_platforms_know_nothing_of_gpus():
    assert compiler_options("tpu", "branches", ragged=True, several=True) == {}
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
