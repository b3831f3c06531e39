"""Microseconds from counts: arithmetic by hand, and the committed counts."""

import pytest

from pallas_kernels.estimate import model
from pallas_kernels.estimate.assumptions import ASSUMPTIONS
from pallas_kernels.estimate.sass import Cost

LOOP = Cost(1000.0, 300, 400.0, 1, 64, {"alu": 350.0, "issue": 20.0})
KERNEL = {"turns": 10, "overhead": 5000.0, "bytes": 0, "l2_bytes": 0, "flops": 0.0, "rate": 1.0}
KERNEL["multiprocessors"] = 132


def call(**changes):
    kernel = KERNEL | {"loops": [LOOP._asdict()]} | changes
    return {"op": "attention", "case": "x", "kernels": [kernel]}


def test_what_runs_side_by_side_shares_all_but_its_chain():
    shared = [(1000, "chain"), (1000, "chain"), (1200, "tensor cores"), (1600, "tensor cores")]
    assert [model.turn([LOOP] * loops) for loops in (1, 2, 3, 4)] == shared


def test_hopper():
    """15,000 cycles at 1.755 GHz; memory takes longer from 36.75 MB on."""
    found = model.estimate_hopper(call())
    assert found.seconds == pytest.approx(15000 / 1.755e9)
    assert (found.bound, found.floor) == ("chain", 0)
    found = model.estimate_hopper(call(bytes=43e6, flops=1e6))
    assert (found.seconds, found.bound) == (pytest.approx(1e-5), "memory")
    assert found.floor == pytest.approx(1e-5)


def test_beyond_memory():
    """One kernel takes 90 µs more than its 10 µs of bytes, the other one nothing."""
    loop = {"chain": 1.0, "issued": 1, "tensor": 1.0, "flops": 0, "columns": 0, "pipes": {}}
    kernel = {"loops": [loop], "overhead": 0, "bytes": 43_000_000, "l2_bytes": 0, "flops": 0}
    kernel["multiprocessors"] = 132
    slow, quick = kernel | {"turns": 1.755e9 * 100e-6}, kernel | {"turns": 1}
    calls = {"op": "grouped_matmul", "kernels": [slow, quick]}
    assert model.beyond_memory(calls) == pytest.approx([90e-6, 0])


def test_tpu():
    one = {"platform": "v6e", "op": "attention", "case": "x", "units": 1000, "bundles": 2.0,
           "bytes": 100, "copies": 2.0, "hertz": 1e9, "bandwidth": 1e12}  # fmt: skip
    found = model.estimate_tpu(one)
    assert found.parts == pytest.approx({"bundles": 2e-6, "memory": 1e-7, "descriptors": 1e-5})
    assert (found.seconds, found.bound) == (pytest.approx(1e-5), "descriptors")


def test_committed_counts_are_not_below_their_roofline():
    found = model.estimates(model.read_counts())
    assert {one.platform for one in found} >= {"h200", "v7x"}
    for one in found:
        assert 1e-6 < one.floor <= one.seconds < 0.1, one
    assert model.table(found).startswith("ESTIMATES, read from compiled programs")


def test_eight_bit_cache_on_hopper_is_bound_by_memory():
    """Half of the bytes: two warpgroups convert them in less time than they take to move."""
    found = {one.case: one for one in model.estimates(model.read_counts()) if one.op == "attention"}
    for name in ("step3", "qwen3-235b"):
        float_pages, narrow = found[f"{name} bf16 decode"], found[f"{name} fp8 decode"]
        assert (float_pages.bound, narrow.bound) == ("memory", "memory")
        assert narrow.seconds < 0.52 * float_pages.seconds
    # 146 GFLOP at FlashMLA's 660 TFLOP/s; the instructions alone would say 637 to 675.
    for form, expected in (("bf16", ("published", 221)), ("int8", ("chain", 229))):
        latent = found[f"deepseek-v3 {form} decode"]
        assert (latent.bound, round(latent.seconds * 1e6)) == expected


def test_no_attention_is_faster_than_published_kernels():
    for one in model.read_counts()["h200"]:
        flops = sum(kernel["flops"] for kernel in one["kernels"])
        if one["op"] == "attention":
            assert flops / model.estimate_hopper(one).seconds < 660.1e12, one["case"]


def test_every_assumption_has_a_source():
    assert all(one.source and one.value > 0 for one in ASSUMPTIONS.values())
