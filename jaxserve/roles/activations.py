"""Estimates the bytes that a step's activations take on a device, from sizes alone, without JAX.

Used by `attention_bytes.py` and `ffn_bytes.py`, and so by `serve` and by the planner.
"""

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.config.model import FFN, MLA, Attention, Compressed

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
    residual: int
    """Columns of a token's residual."""
    vocab: int
    packed: int
    """Bytes of a packed row of a dispatch message."""
    size: int
    """Bytes of a number in the model's dtype."""


def head_width(spec: Attention) -> int:
    """Returns how many numbers attention computes for one head and token: queries before and after
    RoPE, and mixed values; with latents queries before and after absorption, mixed latents and
    values, and a prompt chunk's keys and values."""
    if isinstance(spec, MLA):
        query = spec.nope_dim + spec.rope_dim
        return 2 * query + (spec.kv_latent + spec.rope_dim) + spec.kv_latent + 3 * spec.v_dim
    return 3 * spec.head_dim


def shared_width(spec: Attention) -> int:
    """Returns how many numbers attention computes for one token that its heads share: an indexer's
    queries before and after RoPE, and the chosen positions, each as large as two numbers.
    """
    indexer = spec.indexer if isinstance(spec, MLA | Compressed) else None
    return 2 * (indexer.heads * indexer.head_dim + indexer.top_k) if indexer else 0


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
    lane = tokens * step.residual * size + rows * (step.packed + d * size)
    attend = tokens * (heads // tp * width + shared + d) * size + tokens * d * FP32
    logits = step.slots * step.vocab * FP32
    counts = logits  # as many, of four bytes
    return step.lanes * (lane + counts) + max(attend, 3 * (1 + step.drafts) * logits)


def ffn_activations(
    step: StepSizes,
    mesh: "ExchangeMesh",
    dp: int,
    pieces: int,
    kinds: Mapping[FFN, bool],
    domains: int = 1,
    messages: int = 1,
) -> int:
    """Returns the bytes of activations on an ffn device, which sees the rows of all DP groups.

    For every lane of every domain: a message's rows and their answer in transit. For the one layer
    that runs at a time, over the messages of a pass: all rows packed, unpacked, and the result in
    FP32; the hidden rows of the dense FFN or shared expert; and for every row and routed expert of
    it the sorted row, gate, up and hidden values, and the output, with room for an FP32 copy, which
    accelerators do not make.

    Routing decides at run time how many of these rows belong to a device; in the worst case all do,
    with the all-to-all, too. An all-to-all also holds results in the model's dtype, the device's
    own rows sorted, a copy for each rank that they may go to, and the results that come back for
    them.

    Args:
      dp: DP groups of a domain.
      pieces: attention devices.
      kinds: whether an all-to-all exchanges the rows of a layer's routed experts, by its kind.
      domains: attention workers whose messages arrive here.
      messages: messages that a pass runs side by side, padding included.
    """
    size, d, packed = step.size, step.d_model, step.packed
    rows, devices = dp * step.tokens, mesh.ranks * mesh.tensor
    arriving = -(-rows // pieces) * -(-pieces // devices) * mesh.instances
    lanes = max(step.lanes * domains, messages) if mesh.split else 1
    rows *= messages
    hidden = 2 * FP32 + size

    def layer(spec: FFN, alltoall: bool) -> int:
        top_k = spec.router.top_k if spec.router else 0
        apart = top_k > 0 and mesh.shared > 0  # ranks of its own have the shared expert
        whole = 0 if apart else spec.d_ff
        held = rows * (packed + d * (size + FP32) + -(-whole // devices) * hidden)
        if top_k:
            # The most experts of one row that can all lie on the same device.
            choices = max(top_k, apart * spec.d_ff // spec.expert_d_ff)
            routed = d * (2 * size + FP32) + -(-spec.expert_d_ff // mesh.tensor) * hidden
            held += rows * choices * routed
            if alltoall:
                sent = math.ceil(rows * mesh.own) * min(top_k + apart, mesh.ranks)
                held += rows * d * size + sent * (packed + mesh.tensor * d * size)
        return held

    return lanes * arriving * (packed + d * size) + max(itertools.starmap(layer, kinds.items()))
