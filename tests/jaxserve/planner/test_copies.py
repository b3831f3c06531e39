"""Copies of weights in `step.hlo`: HLO as XLA writes it for TPUs, shortened."""

from pathlib import Path

from jaxserve.planner.copies import Copy, copies

TEXT = Path(__file__).with_name("step.hlo").read_text()


def test_copies_of_weights():
    """Not those inside of a fusion that slices, nor one into memory on the core."""
    found = copies(TEXT, 24 * 1024)
    assert found == [
        Copy("both", 2 * 64 * 768),
        Copy("turned", 64 * 1024),
        Copy("bitcast_convert_type.1", 4 * 64 * 768),
        Copy("in_bits", 64 * 768),
        Copy("int4", 64 * 768 // 2),
    ]
    assert [copy.name for copy in copies(TEXT, 100_000)] == ["bitcast_convert_type.1"]


def test_activations_do_not_count():
    """As logits, which are larger than a layer's weights, where their layout changes."""
    found = copies(TEXT, 24 * 1024, apart=lambda shape: shape == (4096, 8))
    assert "turned" not in [copy.name for copy in found]
    assert len(found) == 4
