import functools
import json

import jax
import jax.numpy as jnp
import pytest

from jaxserve.planner.measurements import read_measurements
from pallas_kernels.attention.shapes import SHAPES as ATTENTION
from pallas_kernels.bench import __main__ as bench
from pallas_kernels.bench import attention, correctness, grouped_matmul, norm_quantize, timing
from pallas_kernels.bench.baselines import BASELINES
from pallas_kernels.bench.cases import INTERPRETED, MODULES, cases
from pallas_kernels.grouped_matmul import mosaic_tpu
from pallas_kernels.grouped_matmul.shapes import SHAPES as EXPERTS
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.nightly import nightly

Capture = pytest.CaptureFixture[str]


def test_attention_counts_bytes_and_flops():
    step = attention.Step(ATTENTION["step3"], "bf16", 64, 8192, 64)
    # 64 x 8192 tokens of 1024 bytes, 64 x 64 heads x 512 of queries and outputs x 2 bytes
    assert step.bytes() == 536_870_912 + 4_194_304
    assert step.flops() == 34_359_738_368
    # 512 bytes and two scales of 4
    assert step._replace(format="int8").bytes() == 272_629_760 + 4_194_304


def test_grouped_matmul_counts_bytes_and_flops():
    step = grouped_matmul.Step(EXPERTS["step3_2a2f"], "bf16", 2048)
    assert step.rows == 3072
    # 24 experts x 3 x 7168 x 640 x 2 bytes, 3072 rows x 7168 x 2 bytes in and out
    assert step.bytes() == 660_602_880 + 88_080_384
    assert step.flops() == 84_557_168_640
    # one byte a weight, 640 + 640 + 7168 scales an expert
    assert step._replace(format="int8").bytes() == 330_301_440 + 811_008 + 88_080_384


def test_attention_of_several_queries():
    step = attention.Step(ATTENTION["step3"], "bf16", 4, 8192, 64, 512)
    # Keys and values are read once a sequence; a query sees those before it and itself.
    assert step.bytes() == 4 * (8192 * 1024 + 512 * 65_536)
    assert step.flops() == 65_536 * 4 * sum(range(8192 - 511, 8193))
    _, pages, _, (table, sequence, position) = attention.inputs(
        step._replace(shape=step.shape._replace(q_heads=2), context=256, queries=3)
    )
    assert pages[0].shape == (16, 1, 64, 256)
    assert table.shape == (4, 4)
    assert sequence.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert position.tolist() == [253, 254, 255] * 4


@pytest.mark.unoptimised
@pytest.mark.parametrize(
    ("op", "case", "count"),
    [("attention", "step3", 3), ("norm_quantize", "step3", 2),
     *nightly(("grouped_matmul", "step3_2a2f", 7))],
)  # fmt: skip
def test_quick_writes_json(op, case, count, tmp_path):
    path = tmp_path / "bench.json"
    assert bench.main(["--quick", "--op", op, "--case", case, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["quick"]
    assert len(found["results"]) == count
    assert all(one["correct"] and one["backend"] == "reference" for one in found["results"])


def test_real_sizes_need_an_accelerator(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--op", "attention", "--case", "step3"])
    assert "a CPU takes hours for real sizes" in capsys.readouterr().err


def test_a_measured_case_stands_beside_its_baselines(capsys):
    (case,) = cases(["norm_quantize"], ["step3"], quick=True)[:1]
    result = bench._measure(case, timing.Effort(1, 1), bench.Rates(1e9, 1e12))
    assert result["correct"]
    assert list(result["baselines"]) == list(BASELINES["norm_quantize"])
    assert result["of_copy"] == pytest.approx(case.step.bytes() / result["seconds"] / 1e9)
    assert f"{result['seconds'] * 1e6:.1f} µs, " in capsys.readouterr().out


@pytest.mark.parametrize("op", ["attention", "grouped_matmul", "norm_quantize"])
def test_the_kernels_of_a_gpu_are_said_to_be_its(op):
    with use_target(Target("mosaic_gpu", "NVIDIA H100 80GB HBM3")):
        step = cases([op], None, quick=True)[0].step
        module = MODULES[op]
        assert bench.backend(module.call(step), module.inputs(step)) == "mosaic_gpu"


def test_every_iteration_computes_everything():
    """Also what depends on weights alone, which XLA would move out of the loop."""

    def function(first: jax.Array, weights: jax.Array) -> jax.Array:
        return first + (weights @ weights)[0]

    loop = jax.jit(functools.partial(timing.repeated, function, 3))
    program = loop.lower(jnp.ones(64), jnp.ones((64, 64))).compile().as_text()
    before, entry = program.split("ENTRY")
    assert " dot(" in before
    assert " dot(" not in entry


@pytest.mark.unoptimised
def test_a_wrong_result_fails_the_run(monkeypatch, capsys):
    right = correctness.distance
    monkeypatch.setattr(correctness, "distance", lambda got, expected: right(1.1 * got, expected))
    assert bench.main(["--quick", "--op", "attention", "--case", "step3"]) == 1
    assert "WRONG by 0.1" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.unoptimised
def test_a_wrong_layer_fails_the_run_and_is_not_written(monkeypatch, capsys, tmp_path):
    path = tmp_path / "layer.json"
    monkeypatch.setattr(correctness, "distance", lambda got, expected: 0.08)
    assert bench.main(["--quick", "--layer", "step3", "--json", str(path)]) == 1
    assert capsys.readouterr().out.count("WRONG by 0.08") == 4
    # What is within the tolerance of FP8 is none within that of the other two.
    assert {one["format"] for one in json.loads(path.read_text())} == {"fp8"}


def test_formats_ask_for_their_rows():
    shape = EXPERTS["step3_2a2f"]._replace(d_model=128, d_ff=128, groups=2)
    asked = {}
    for format in grouped_matmul.FORMATS:
        step = grouped_matmul.Step(shape, format, 8)
        weights = grouped_matmul.inputs(step)[1]
        dtype = (weights.values if format != "bf16" else weights).dtype.name
        asked[format] = dtype, grouped_matmul.call(step).keywords["row_format"]
    assert asked == {
        "bf16": ("bfloat16", None), "int8": ("int8", None), "fp8": ("uint8", None),
        "fp8_block": ("uint8", None), "fp8_block_rows": ("uint8", "fp8"),
        "int8_rows": ("int8", "int8"), "int8_float": ("int8", "float"),
    }  # fmt: skip
    assert set(asked) <= set(correctness.TOLERANCE)


def test_the_reference_is_no_kernel_that_was_traced_before(monkeypatch):
    """The op is one function for all targets, and JAX's caches know of none."""
    step = grouped_matmul.Step(
        EXPERTS["step3_2a2f"]._replace(d_model=128, d_ff=128, groups=2), "bf16", 8
    )
    arguments, function = grouped_matmul.inputs(step), grouped_matmul.call(step)
    monkeypatch.setattr(mosaic_tpu, "grouped_swiglu", lambda call, *_: jnp.zeros_like(call.rows))
    with use_target(INTERPRETED):
        output = correctness.run(function, arguments)
        assert correctness.distance(output, correctness.expected(function, arguments)) == 1


def test_counts_of_a_norm():
    """Step-3, 128 rows: read in BF16, written in BF16 and 8 bits."""
    step = norm_quantize.Step(7168, "fp8", 128)
    assert step.bytes() == 128 * 7168 * 5 + 128 * 4 + 7168 * 2


@pytest.mark.unoptimised
def test_the_planner_reads_the_layers(tmp_path):
    path = tmp_path / "layer.json"
    assert bench.main(["--quick", "--layer", "step3", "--json", str(path)]) == 0
    found = read_measurements(path)
    assert {one.device_kind for one in found} == {"quick run on cpu"}
    assert [(one.op, one.format, one.cache) for one in found] == [
        ("attend", "bfloat16", None), ("ffn", "bfloat16", None), ("attend", "fp8", "bfloat16"),
        ("attend", "int8", None), ("ffn", "int8", None), ("attend", "fp8", None),
        ("ffn", "fp8", None),
    ]  # fmt: skip
