"""What a step's activations take on a device, in plain numbers.

Called by `capacity.py`, which `serve` goes by, and by the planner, so that both count alike. Knows
sizes, neither arrays nor JAX.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.model.ffn.traffic import ExchangeMesh

FP32 = 4


class StepSizes(NamedTuple):
    """A step, its rows and their formats."""

    tokens: int
    """Of a DP group, in the largest step."""
    slots: int
    """Sequences of a DP group and lane."""
    lanes: int
    drafts: int
    d_model: int
    vocab: int
    packed: int
    """Bytes of a row of a dispatch message."""
    size: int
    """Bytes of a number in the model's dtype."""


class FFNWidths(NamedTuple):
    """A kind of FFN layer."""

    whole: int
    """Hidden width of what every row meets: a dense FFN, or shared experts; 0: none."""
    routed: int
    """Hidden width of an expert; 0: none."""
    choices: int
    """Experts of a row that may all be a device's own."""
    alltoall: bool
    """How rows are exchanged."""
    sent: int = 0
    """Ranks that a row may go to in an all-to-all."""


def latent_width(query: int, latent: int, rope: int, value: int) -> int:
    """Numbers of a head and token of latent attention: queries before and after absorption, mixed
    latents and values, and the keys and values of a chunk of a prompt."""
    return 2 * query + (latent + rope) + latent + 3 * value


def attention_activations(step: StepSizes, heads: int, tp: int, width: int) -> int:
    """Bytes on an attention device.

    Of every lane: the residual stream of its DP group's tokens, and a message and its answer on
    their way. Of the one program that runs: either a layer's normed tokens, its heads (queries
    before and after RoPE or absorption, mixed values; with latents also the keys and values of a
    prefill chunk) and its output in FP32; or the logits in FP32, three times for the sampler, of
    every slot's last token and its drafts. And
    every lane's token counts for penalties, an int32 a slot and token of the vocabulary.
    Attention scores are not in it: kernels keep them on the chip.

    Args:
      heads: query heads.
      width: numbers of a head and token.
    """
    tokens, size, d = step.tokens, step.size, step.d_model
    rows = -(-tokens // tp)
    lane = tokens * d * size + rows * (step.packed + d * size)
    attend = tokens * (heads // tp * width + d) * size + tokens * d * FP32
    logits = step.slots * step.vocab * FP32
    counts = logits  # as many, of four bytes
    return step.lanes * (lane + counts) + max(attend, 3 * (1 + step.drafts) * logits)


def ffn_activations(
    step: StepSizes, mesh: ExchangeMesh, dp: int, pieces: int, kinds: Iterable[FFNWidths]
) -> int:
    """Bytes on an ffn device, which sees the rows of all DP groups.

    Of every lane: a message's rows and their answer on their way. Of the one layer that runs: all
    rows packed, unpacked, and the result in FP32; the hidden rows of the dense FFN or the shared
    expert; and of the routed experts, for every row and expert of it, the sorted row, gate, up and
    hidden values, and the output, with room for an FP32 copy on its way back, which accelerators do
    not make. The routing decides at run time how many of these rows are a device's own: all of
    them, in the worst case. So it is with the all-to-all, which besides holds results in the
    model's dtype, its own rows sorted, a copy for each rank that they may go to, and the results
    that come back for them.

    Args:
      dp: DP groups of a domain.
      pieces: attention devices.
    """
    size, d, packed = step.size, step.d_model, step.packed
    rows, devices = dp * step.tokens, mesh.ranks * mesh.tensor
    arriving = -(-rows // pieces) * -(-pieces // devices) * mesh.instances
    lanes = step.lanes if mesh.split else 1
    hidden = 2 * FP32 + size

    def layer(kind: FFNWidths) -> int:
        held = rows * (packed + d * (size + FP32) + -(-kind.whole // devices) * hidden)
        if kind.routed:
            routed = d * (2 * size + FP32) + -(-kind.routed // mesh.tensor) * hidden
            held += rows * kind.choices * routed
            if kind.alltoall:
                sent = math.ceil(rows * mesh.own) * kind.sent
                held += rows * d * size + sent * (packed + mesh.tensor * d * size)
        return held

    return lanes * arriving * (packed + d * size) + max(map(layer, kinds))
