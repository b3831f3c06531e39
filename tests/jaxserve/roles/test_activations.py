"""Bytes of a step's activations, counted by hand."""

from jaxserve.config.model import FFN
from jaxserve.model.ffn.traffic import ExchangeMesh
from jaxserve.roles.activations import StepSizes, attention_activations, ffn_activations

STEP = StepSizes(10, 4, 3, drafts=1, d_model=16, residual=24, vocab=20, packed=18, size=2)


def test_bytes_on_an_attention_device():
    """tp 2: a lane has 10 rows of 24 numbers, 5 messages and answers, and 24 counts."""
    lane = 10 * 24 * 2 + 5 * (18 + 16 * 2)
    counts = 4 * 20 * 4
    # A layer: normed rows, 4 heads of 7 numbers, and the output in FP32.
    layer = 10 * (16 + 4 * 7) * 2 + 10 * 16 * 4
    logits = 3 * (1 + 1) * 4 * 20 * 4
    assert (layer, logits) == (1520, 1920)
    assert attention_activations(STEP, 8, 2, 7) == 3 * (lane + counts) + logits
    without = STEP._replace(drafts=0)
    assert attention_activations(without, 8, 2, 7) == 3 * (lane + counts) + layer


def test_bytes_on_an_ffn_device():
    """Rows of 2 groups, in 4 pieces, at 2 devices: each lane has 2 pieces of 5 rows of a device."""
    arriving = 2 * 5 * (18 + 16 * 2)
    # A layer's 20 rows: packed, unpacked, their result in FP32, and half of 24 hidden numbers.
    layer = 20 * (18 + 16 * (2 + 4) + 12 * (2 * 4 + 2))
    kind = FFN(d_ff=24)
    step = STEP, ExchangeMesh(2, 1, 4), 2, 4, {kind: False}
    assert ffn_activations(*step) == 3 * arriving + layer
    # Messages of all lanes of two domains; passes of four. With one lane, padding in their place.
    assert ffn_activations(*step, 2, 4) == 6 * arriving + 4 * layer
    step = STEP._replace(lanes=1), *step[1:]
    assert ffn_activations(*step, 3, 4) == 4 * arriving + 4 * layer
