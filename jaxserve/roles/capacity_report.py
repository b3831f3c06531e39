"""Shows the memory that a deployment takes as a table, for `serve --check`."""

from collections.abc import Mapping, Sequence

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.config.shipped import device_kind
from jaxserve.config.topology import Role
from jaxserve.link.dispatch.contract import MOST_MESSAGES
from jaxserve.model.ffn import traffic
from jaxserve.model.row_width import deployment_row_bytes
from jaxserve.roles.capacity import RoleBytes, Sizes, gb_text
from jaxserve.roles.ffn_bytes import most_messages, pass_activations
from jaxserve.roles.parameters import count_parameters
from jaxserve.roles.role_bytes import role_bytes


def describe(
    config: ModelConfig,
    deployment: Deployment,
    memory: Mapping[Role, int | None],
    sizes: Sizes = role_bytes,
) -> str:
    """Returns a readable table of the model's parameters and the bytes on every role's devices,
    which `sizes` computes.

    Raises:
      ConfigError: the model cannot be divided over the deployment's meshes.
    """
    count = count_parameters(config)
    lines = [
        f"parameters   {_billions(count.total)}, of which a token meets "
        f"{_billions(count.activated)}"
    ]
    if count.prediction:
        lines.append(f"             and {_billions(count.prediction)} of multi-token prediction")
    sequences = deployment.scheduler.slots * deployment.lanes
    tokens = deployment.cache.pages * deployment.cache.page_size
    lines.append(
        f"KV cache     {tokens:,} tokens a DP group, of up to {sequences} sequences at a time; "
        f"{deployment.attention.dp * tokens:,} in all"
    )
    if deployment.cache.host_gb:
        lines.append(f"host memory  {deployment.cache.host_gb:g} GB for KV pages (cache.host_gb)")
    for place, said in enumerate(describe_exchange(config, deployment)):
        lines.append(f"{'' if place else 'exchange':11}  {said}")
    parts = sizes(config, deployment)
    lines += _table(parts, memory)
    if deployment.topology.crosses_runtimes:
        lines.append(describe_passes(config, deployment, memory["ffn"]))
    lines += [
        f"{part.role}.memory_gb is not set: whether it fits is not known here"
        for part in parts
        if memory[part.role] is None
    ]
    return "\n".join(lines)


def describe_passes(config: ModelConfig, deployment: Deployment, available: int | None) -> str:
    """Returns a line about the messages that passes of an ffn worker over `pull` have side by side,
    and their memory.

    Args:
      available: bytes of an ffn device; None: unknown.
    """
    batching, domains = deployment.link.batching, deployment.domains
    if batching == "rotation":
        return "ffn passes   of one message (link.batching: rotation)"
    most = most_messages(config, deployment, available)
    used = min(most, 1 << (domains - 1).bit_length())
    bound = f"{most} is the most" if most == MOST_MESSAGES else f"memory allows {most}"
    return (
        f"ffn passes   of up to {used} messages side by side, domains = {domains} (link.batching: "
        f"{batching}): {gb_text(pass_activations(config, deployment, used))} GB of activations a "
        f"device; {bound}"
    )


def _table(parts: Sequence[RoleBytes], memory: Mapping[Role, int | None]) -> list[str]:
    fields = {"weights": "weights", "KV pages": "cache", "rings": "rings"}
    fields |= {"activations": "activations", "moving": "moving", "sum": "total"}
    if not any(part.rings for part in parts):
        del fields["rings"]
    rows = [["GB a device", "devices", *fields, "of"]]
    for part in parts:
        numbers = [gb_text(getattr(part, field)) for field in fields.values()]
        available = memory[part.role]
        known = "?" if available is None else gb_text(available)
        rows.append([part.role, str(part.devices), *numbers, known])
    name, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([row[0].ljust(name), *map(str.rjust, row[1:], others)]) for row in rows]


def _billions(count: int) -> str:
    short = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
    return f"{short} ({count:,})"


def describe_exchange(config: ModelConfig, deployment: Deployment) -> list[str]:
    """Returns lines about the exchange and its bytes; empty if nothing is exchanged."""
    mesh = traffic.exchange_mesh(deployment)
    if not config.experts or mesh.ranks == 1:
        return []
    row = deployment_row_bytes(config, deployment)
    met = traffic.ranks_met(mesh, config.experts, config.top_k)
    kind = traffic.exchange_of(config, deployment)
    moved: dict[traffic.ExchangeKind, traffic.Moved] = {
        "gather": traffic.gather_moves(mesh, row),
        "alltoall": traffic.alltoall_moves(mesh, row, met / mesh.ranks, config.moe.d_ff > 0),
    }
    (other,) = moved.keys() - {kind}
    numbers = {
        name: f"{way.there / 1e3:.1f} KB there, {way.back / 1e3:.1f} KB back"
        for name, way in moved.items()
    }
    lines = [
        f"{kind}: {numbers[kind]}; {other}: {numbers[other]}",
        "what a device receives a layer, for each of its own rows, which have experts on "
        f"{met:.2f} of {mesh.ranks} ranks",
    ]
    if mesh.shared:
        parts = config.moe.d_ff / config.moe.expert_d_ff / mesh.shared
        lines.append(
            f"{mesh.ranks} ranks = {mesh.routed} with routed experts, which multiply "
            f"{config.top_k / mesh.routed:.3f} rows a token on average, + {mesh.shared} with the "
            f"shared expert: {parts:.3f}"
        )
    hardware = (deployment.ffn if deployment.topology.has("ffn") else deployment.attention).hardware
    if kind == "alltoall" and not device_kind(hardware).startswith("TPU"):
        lines.append(
            "alltoall between GPUs needs NCCL 2.29, and GIN between hosts; tested at start"
        )
    return lines
