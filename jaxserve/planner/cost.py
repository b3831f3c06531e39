"""The cost of decoding a token in bytes, FLOPs and dollars at full utilisation: the formulas of
Step-3 (arXiv 2507.19427) §4 and §5.4, by which `published.py` recomputes its tables. Plans follow
from the rooflines of `stages.py` instead."""

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


def minimum_sparsity(
    hardware: Hardware, d_model: int, layers: int, stage_seconds: float = STAGE_SECONDS
) -> float:
    """Share of the experts below which the messages of a batch that fills the FFN take longer than
    a stage of all layers (§5.4): 8-bit dispatch and 16-bit combine over the links of one host. Like
    the paper, which rounds 16.6 ms × 2/3 to 11.1 ms, this rounds."""
    budget = round(stage_seconds * 2 / 3, 4)
    messages = hardware.host_network * hardware.bandwidth * budget
    return d_model * hardware.paper_flops * layers / messages
