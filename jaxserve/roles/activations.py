"""Estimates the bytes that a step's activations take on a device, from sizes alone, without JAX.

Used by `capacity.py`, and so by `serve`, and by the planner, so that both arrive at the same
number.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.config.model import MLA, Attention

if TYPE_CHECKING:
    from jaxserve.model.ffn.traffic import ExchangeMesh

FP32 = 4


class StepSizes(NamedTuple):
    """Tokens and slots of a step, and the widths of its rows."""

    tokens: int
    """Tokens of a DP group in the largest step."""
    slots: int
    """Slots of a DP group in one lane."""
    lanes: int
    drafts: int
    d_model: int
    vocab: int
    packed: int
    """Bytes of a packed row of a dispatch message."""
    size: int
    """Bytes of a number in the model's dtype."""


class FFNWidths(NamedTuple):
    """Widths of one kind of FFN layer, and the way its rows are exchanged."""

    whole: int
    """Hidden width of the dense FFN or shared experts, which every row passes; 0: none."""
    routed: int
    """Hidden width of a routed expert; 0: the layer has none."""
    choices: int
    """Most experts of one row that can all lie on the same device."""
    alltoall: bool
    """True if rows are exchanged by all-to-all, False if they are gathered."""
    sent: int = 0
    """Most ranks that an all-to-all sends one row to."""


def head_width(spec: Attention) -> int:
    """Returns how many numbers attention computes for one head and token: queries before and after
    RoPE, and mixed values; with latents queries before and after absorption, mixed latents and
    values, and a prompt chunk's keys and values."""
    if isinstance(spec, MLA):
        query = spec.nope_dim + spec.rope_dim
        return 2 * query + (spec.kv_latent + spec.rope_dim) + spec.kv_latent + 3 * spec.v_dim
    return 3 * spec.head_dim


def shared_width(spec: object) -> int:
    """Returns how many numbers attention computes for one token that its heads share: an indexer's
    queries before and after RoPE, and the chosen positions, each as large as two numbers.

    Args:
      spec: attention of any kind, the planner's own included.
    """
    indexer = spec.indexer if isinstance(spec, MLA) else None
    return 2 * (indexer.heads * indexer.head_dim + indexer.top_k) if indexer else 0


def ffn_widths(
    d_ff: int, expert_d_ff: int, top_k: int, mesh: "ExchangeMesh", *, alltoall: bool
) -> FFNWidths:
    """Returns the widths of an FFN layer on a mesh, whose ranks may have the shared expert apart.

    Args:
      d_ff: hidden width of the dense FFN or of the shared experts; 0: none.
      expert_d_ff, top_k: of routed experts; 0: the layer is dense.
    """
    if not top_k:
        return FFNWidths(d_ff, 0, 0, alltoall=False)
    shared = d_ff // expert_d_ff if mesh.shared else 0
    return FFNWidths(
        0 if mesh.shared else d_ff,
        expert_d_ff,
        max(top_k, shared),
        alltoall,
        min(top_k + (mesh.shared > 0), mesh.ranks),
    )


def attention_activations(step: StepSizes, heads: int, tp: int, width: int, shared: int = 0) -> int:
    """Returns the bytes of activations on an attention device.

    For every lane: the residual stream of its DP group's tokens, a message and its answer in
    transit, and the token counts for penalties (an int32 for each slot and token of the
    vocabulary).

    For the one program that runs at a time, the larger of two: one layer's normed tokens, heads
    (queries before and after RoPE or absorption, mixed values, with latents also the keys and
    values of a prefill chunk) and FP32 output; or the FP32 logits, three times for the sampler, of
    every slot's last token and its drafts. Attention scores are not counted, because kernels keep
    them on the chip.

    Args:
      heads: query heads.
      width: numbers computed for one head and token.
      shared: numbers computed for one token that every device of `tp` holds.
    """
    tokens, size, d = step.tokens, step.size, step.d_model
    rows = -(-tokens // tp)
    lane = tokens * d * size + rows * (step.packed + d * size)
    attend = tokens * (heads // tp * width + shared + d) * size + tokens * d * FP32
    logits = step.slots * step.vocab * FP32
    counts = logits  # as many, of four bytes
    return step.lanes * (lane + counts) + max(attend, 3 * (1 + step.drafts) * logits)


def ffn_activations(
    step: StepSizes, mesh: "ExchangeMesh", dp: int, pieces: int, kinds: Iterable[FFNWidths]
) -> int:
    """Returns the bytes of activations on an ffn device, which sees the rows of all DP groups.

    For every lane: a message's rows and their answer in transit. For the one layer that runs at a
    time: all rows packed, unpacked, and the result in FP32; the hidden rows of the dense FFN or
    shared expert; and for every row and routed expert of it the sorted row, gate, up and hidden
    values, and the output, with room for an FP32 copy, which accelerators do not make.

    Routing decides at run time how many of these rows belong to a device; in the worst case all do,
    with the all-to-all, too. An all-to-all also holds results in the model's dtype, the device's
    own rows sorted, a copy for each rank that they may go to, and the results that come back for
    them.

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
