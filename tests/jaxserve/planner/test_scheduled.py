"""Groups of collectives, and copies of weights, read from HLO as XLA writes it (`weights.hlo` is
shortened); names and axes of collectives are in `test_compile_command.py`."""

from jaxserve.planner.scheduled import Copy, copies, exchanged_bytes
from tests import golden

WEIGHTS = golden.text("planner/weights.hlo")


def test_groups_that_are_listed():
    """Of devices next to each other it says how many; of others nothing, which is all of them."""
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
    """As logits, which are larger than a layer's weights, where their layout changes."""
    found = copies(WEIGHTS, 24 * 1024, apart=lambda shape: shape == (4096, 8))
    assert "turned" not in [copy.name for copy in found]
    assert len(found) == 4
