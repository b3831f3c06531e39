"""The cost of decoding a token in bytes, FLOPs and dollars at full utilisation, and the rules that
follow from it: the formulas of Step-3 (arXiv 2507.19427) §4 to §6."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.planner.hardware import Hardware
from jaxserve.planner.models import AttentionLayers, CostModel

STAGE_SECONDS = 0.0166
"""A third of 50 ms, as the paper rounds it (§3.1, §6)."""


class TokenCost(NamedTuple):
    """The cost of one decoded token, summed over all layers (Step-3, tables 2 and 3)."""

    cache_bytes: float
    """Bytes of KV cache and states read, at 8 bits a number unless the model fixes the format. A
    state is read and written, so it counts twice."""
    attention_flops: float
    """FLOPs of attention proper, without the linear maps."""
    linear_flops: float
    """FLOPs of the linear maps before and after attention."""
    ffn_flops: float
    """FLOPs of the FFN, without the router."""


def token_cost(model: CostModel, context: int) -> TokenCost:
    """Returns the cost of a token after `context` tokens."""
    groups = model.attention
    read = ((1 + g.has_state) * (g.cache_bytes or 1) * g.cached_numbers(context) for g in groups)
    return TokenCost(
        sum(g.layers * size for g, size in zip(groups, read, strict=True)),
        sum(g.layers * _attention_flops(g, context) for g in groups),
        2.0 * model.linear_parameters,
        2.0 * model.ffn_activated,
    )


def _attention_flops(group: AttentionLayers, context: int) -> float:
    """FLOPs of a layer: q·k and p·v over every token of the context.

    For latent attention the paper takes the cached row's width, 576, for both products; the true
    cost of the absorbed form is 5.6 % less.
    """
    if group.has_state:
        return group.core_flops
    core = 4.0 * group.spec.q_heads * group.key_dim * group.attended(context)
    return core + group.index_flops * group.scored(context)


def attention_dollars(model: CostModel, context: int, hardware: Hardware) -> float:
    """USD per million tokens (§4.2): the core bound by compute or by memory, then the linear maps,
    bound by compute."""
    cost = token_cost(model, context)
    core = max(
        cost.attention_flops * hardware.dollars_per_flop,
        cost.cache_bytes * hardware.dollars_per_byte,
    )
    return 1e6 * (core + cost.linear_flops * hardware.dollars_per_flop)


def ffn_dollars(model: CostModel, hardware: Hardware) -> float:
    """USD per million tokens (§4.2): bound by compute, as large batches are."""
    return 1e6 * 2.0 * model.ffn_activated * hardware.dollars_per_flop


class Choice(NamedTuple):
    """The cheapest hardware for each role."""

    dollars: float
    """USD per million tokens, both roles together."""
    attention: str
    ffn: str


def cheapest(model: CostModel, context: int, hardware: dict[str, Hardware]) -> Choice:
    """AFD: attention and FFN each on the hardware that is cheapest for it (§4.2)."""
    attention = {name: attention_dollars(model, context, h) for name, h in hardware.items()}
    ffn = {name: ffn_dollars(model, h) for name, h in hardware.items()}
    best = min(attention, key=attention.__getitem__), min(ffn, key=ffn.__getitem__)
    return Choice(attention[best[0]] + ffn[best[1]], *best)


def ffn_batch(hardware: Hardware, sparsity: float) -> float:
    """Tokens from which an FFN with 8-bit weights is bound by compute (§5.3)."""
    return hardware.roofline / (2 * sparsity)


def minimum_sparsity(
    hardware: Hardware, d_model: int, layers: int, stage_seconds: float = STAGE_SECONDS
) -> float:
    """Share of the experts below which the messages of a batch that fills the FFN take longer than
    a stage of all layers (§5.4): 8-bit dispatch and 16-bit combine over the links of one host. Like
    the paper, which rounds 16.6 ms × 2/3 to 11.1 ms, this rounds."""
    budget = round(stage_seconds * 2 / 3, 4)
    messages = hardware.host_network * hardware.bandwidth * budget
    return d_model * hardware.paper_flops * layers / messages


def network_batch(hardware: Hardware, d_model: int, layers: int, stage_seconds: float) -> float:
    """Tokens whose messages, both ways, one host's network carries in a stage of a layer (§5.4)."""
    return stage_seconds / layers * hardware.host_network / (3 * d_model)


class AttentionFit(NamedTuple):
    """Whether a device can be an attention device at all (§6), by a layer's stage."""

    readable_bytes: float
    """Bytes that the memory delivers."""
    linear_bytes: float
    """8-bit weights of the linear maps that the device holds."""
    cached_tokens: int
    """Tokens whose cache the rest of the stage can read, of all sequences together; 0: it cannot
    even read the weights."""


def attention_fit(model: CostModel, hardware: Hardware, stage_seconds: float) -> AttentionFit:
    """Checks the largest group of attention layers against a stage of one layer. As in the paper
    the output map is split over eight devices, and the other maps are whole on every device."""
    group = max(model.attention, key=lambda g: g.layers)
    readable = hardware.bandwidth * stage_seconds
    output = group.spec.q_heads * group.value_dim * model.d_model
    linear = sum(group.split_parameters(model.d_model)) - output + output / 8
    per_token = (group.cache_bytes or 1) * group.cached_numbers(1)
    tokens = max(0, math.floor((readable - linear) / per_token))
    return AttentionFit(readable, linear, tokens)


class FFNFit(NamedTuple):
    """How many devices it takes to read all FFN weights in time (§6)."""

    layer_bytes: float
    """Bytes of one layer that a device can read in time."""
    host_bytes: float
    """Bytes of all layers that a host can read in time."""
    weight_bytes: float
    """All FFN weights, in 8 bits."""
    hosts: int
    devices: int


def ffn_fit(model: CostModel, hardware: Hardware, stage_seconds: float) -> FFNFit:
    """Checks a stage of one layer at half of the memory bandwidth, since compute takes the other
    half of the time."""
    layer = hardware.bandwidth * 0.5 * stage_seconds
    host = layer * model.layers * hardware.devices_per_host
    hosts = math.ceil(model.ffn_parameters / host)
    return FFNFit(layer, host, model.ffn_parameters, hosts, hosts * hardware.devices_per_host)


class Check(NamedTuple):
    """A rule and whether it holds."""

    name: str
    holds: bool
    numbers: str

    @property
    def text(self) -> str:
        return f"{'holds' if self.holds else 'FAILS'}  {self.name}: {self.numbers}"


def checks(
    model: CostModel,
    context: int,
    tpot: float,
    attention: Hardware,
    ffn: Hardware,
    tokens: int | None = None,
) -> Iterator[Check]:
    """Yields the rules for a pair of hardware and, given the tokens of a lane, for its batch.

    Args:
      tpot: time per output token in seconds; each of the three pipeline stages gets a third.
    """
    stage = tpot / 3
    layer = stage / model.layers
    sparsity = model.moe.sparsity if model.moe else 1.0
    fills = ffn_batch(ffn, sparsity)
    if model.moe:
        least = minimum_sparsity(ffn, model.d_model, model.layers, stage)
        yield Check(
            "sparsity (§5.4)",
            sparsity >= least,
            f"experts' sparsity {sparsity:.3f}, least {least:.3f} for {ffn.name} at "
            f"{tpot * 1e3:g} ms: {fills:.0f} tokens fill the FFN, the network carries "
            f"{network_batch(ffn, model.d_model, model.layers, stage):.0f} a stage",
        )
    if tokens is not None:
        yield Check(
            "FFN batch (§5.3)",
            tokens >= fills,
            f"{tokens} tokens a lane, {fills:.0f} make the FFN compute-bound on {ffn.name}",
        )
    fit = attention_fit(model, attention, layer)
    sequences = fit.cached_tokens // context
    yield Check(
        "attention in time (§6)",
        sequences >= 1,
        f"{attention.name} reads {fit.readable_bytes / 1e6:.0f} MB in {layer * 1e6:.0f} µs, of "
        f"which {fit.linear_bytes / 1e6:.0f} MB are weights: {fit.cached_tokens:,} tokens of "
        f"cache, {sequences} sequences of {context:,} a device and lane",
    )
    needed = ffn_fit(model, ffn, layer)
    yield Check(
        "FFN in time (§6)",
        needed.devices < 100,
        f"{needed.weight_bytes / 1e9:.0f} GB of FFN weights at half of the bandwidth take "
        f"{needed.hosts} hosts, {needed.devices} {ffn.name} (a hundred and more are trouble)",
    )
