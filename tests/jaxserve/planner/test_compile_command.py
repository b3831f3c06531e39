"""How `plan compile` shows the compiler's answers; `test_aot.py` has the real compiler."""

import msgspec
import pytest

from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import AttentionRole, FFNRole
from jaxserve.planner.aot import CompiledProgram, RoleMemory, deployment_buckets
from jaxserve.planner.compile_command import copied, failures, host_lines, remarks
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.scheduled import Copy, copies, count_collectives, exchanged_bytes
from jaxserve.roles.layout import Bucket
from tests import golden

GOOD = CompiledProgram("attend_moe", "attention", Bucket(32, 32), 56, 20.0, "")
HELD = RoleMemory("ffn", 32, int(30e9), 0, int(1e9), int(1e9), int(1e9), 0)


def deployment(**changes: object) -> Deployment:
    return msgspec.structs.replace(Deployment(model=""), **changes)


V6E = load_hardware("v6e")


@pytest.mark.parametrize(
    ("made", "programs", "held", "expected"),
    [
        (deployment(), [GOOD], [HELD], []),
        (deployment(), [GOOD], [HELD._replace(cache=int(5e9))], ["ffn: 38.00 GB", "have 34.30 GB"]),
        (deployment(ffn=FFNRole(memory_gb=32.0)), [GOOD], [HELD], ["which have 32.00 GB"]),
        (deployment(), [GOOD, GOOD._replace(error="40G of 31G")], [], ["attend_moe 32x32: 40G of"]),
    ],
)
def test_failures(made, programs, held, expected):
    found = failures(made, programs, held, V6E)
    assert len(found) == min(len(expected), 1)
    assert all(text in found[0] for text in expected)


def test_remarks():
    """FP8 products that a device does not have; memory of a role, of which colocation has one."""
    roomy = AttentionRole(memory_gb=30)
    fp8 = msgspec.structs.replace(roomy, weights="fp8")
    made = deployment(attention=fp8, ffn=FFNRole(memory_gb=30))
    (note,) = remarks(made, V6E, "TPU v6 lite")
    assert note == "attention.weights = fp8: TPU v6 lite has no such products, they run in BF16"
    assert remarks(made, load_hardware("v7x"), "TPU7x") == []
    assert remarks(deployment(mode="colocated", attention=roomy), V6E, "TPU v6 lite") == []
    (note,) = remarks(deployment(mode="colocated"), V6E, "TPU v6 lite")
    assert note.startswith("attention.memory_gb is not set: 34.3 GB")


def test_copies_are_said():
    (note,) = copied([GOOD, GOOD._replace(name="step", copied=15_400_000_000)])
    assert note.startswith("step 32x32 writes 15.40 GB of weights or pages again before")


def test_collectives_are_counted_once_and_name_their_axes():
    text = golden.text("planner/counted.hlo")
    assert count_collectives(text) == {"all-gather": 2, "reduce-scatter": 1}
    # 256 bytes and 16, the larger side of %b; 8 bytes on each of 4 devices.
    assert exchanged_bytes(text, 4) == {
        "all-gather": 256,
        "2. all-gather": 16,
        "reduce-scatter": 32,
    }
    assert exchanged_bytes(golden.text("planner/axes.hlo"), 16, ragged=12.5) == {
        "ragged-all-to-all over 4 neighbours": 100,
        "all-gather over ep tp": 128,
        "all-to-all over tp": 32,
        "all-to-all over ep": 16,
        "reduce-scatter over tp": 64,
    }


def test_buckets_are_those_of_the_engine():
    made = deployment(attention=AttentionRole(dp=2), ffn=FFNRole(ep=3))
    limits = msgspec.structs.replace(made.scheduler, token_buckets=[8, 128], page_buckets=[16, 64])
    made = msgspec.structs.replace(made, scheduler=limits)
    # The ffn mesh, which 8 rows do not divide over, pads them itself.
    assert deployment_buckets(made) == [Bucket(t, p) for t in (8, 128) for p in (16, 64)]


def test_what_each_host_compiles():
    other = GOOD._replace(name="ffn_moe", role="ffn", seconds=4.4)
    both = ("attention", "ffn")
    assert host_lines([GOOD, other], {0: ("attention",), 1: ("attention",), 2: ("ffn",)}) == [
        "hosts 0 to 1: attention: 1 programs, 20 s",
        "host 2: ffn: 1 programs, 4 s",
    ]
    assert host_lines([GOOD, other], {0: both, 2: both}) == [
        "hosts 0, 2: attention and ffn: 2 programs, 24 s"
    ]


WEIGHTS = golden.text("planner/weights.hlo")


def test_groups_that_are_listed():
    """The text counts devices next to each other; without a count, all devices are meant."""
    line = "  %a = u8[64,8]{1,0} all-gather(%x), replica_groups={GROUPS}, dimensions={0}"
    ragged = "  %b = u8[64,8]{1,0} ragged-all-to-all(%x, %y), replica_groups={GROUPS}"

    def named(groups):
        text = "\n".join(each.replace("GROUPS", groups) for each in (line, ragged))
        return exchanged_bytes(text, 4, ragged=10)

    assert named("{0,1},{2,3}") == {
        "all-gather over 2 neighbours": 512,
        "ragged-all-to-all over 2 neighbours": 80,
    }
    everywhere = {"all-gather": 512, "ragged-all-to-all": 80}
    assert named("{0,2},{1,3}") == everywhere
    assert named("{1,2},{3,0}") == everywhere
    assert named("{1,0},{2,3}") == everywhere


def test_copies_of_weights():
    """Not those inside of a fusion that slices, nor one into memory on the core."""
    found = copies(WEIGHTS, 24 * 1024)
    assert found == [
        Copy("both", 2 * 64 * 768),
        Copy("turned", 64 * 1024),
        Copy("bitcast_convert_type.1", 4 * 64 * 768),
        Copy("in_bits", 64 * 768),
        Copy("int4", 64 * 768 // 2),
    ]
    assert [copy.name for copy in copies(WEIGHTS, 100_000)] == ["bitcast_convert_type.1"]


def test_activations_do_not_count():
    """Logits are larger than a layer's weights and are copied where their layout changes."""
    found = copies(WEIGHTS, 24 * 1024, apart=lambda shape: shape == (4096, 8))
    assert "turned" not in [copy.name for copy in found]
    assert len(found) == 4
