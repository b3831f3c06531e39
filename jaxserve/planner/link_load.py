"""Computes the bytes that cross between an attention runtime and an ffn runtime in a step, and the
least time that the link takes for them. `serve --check`, `plan simulate` and the plans that are
written refuse by it."""

from collections import Counter
from typing import NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.route import Route


class LinkLoad(NamedTuple):
    """Load of a decode step on a link between runtimes, with every slot in use."""

    there: int
    """Bytes of a domain's messages to an ffn worker, all layers together."""
    back: int
    """Bytes of the answers to them."""
    domains: int
    """Domains that share the ffn worker."""
    busiest: float
    """Domains whose rows the busiest process of either role carries: all of them at an ffn worker
    of one process, half at one of two processes between which pieces are spread evenly."""
    rate: float
    """Bytes a second that a process carries each way."""

    @property
    def seconds(self) -> float:
        """Least time between two tokens of a sequence."""
        return self.busiest * max(self.there, self.back) / self.rate

    def __str__(self) -> str:
        return (
            f"a step moves {self.there / 1e9:.3g} GB there and {self.back / 1e9:.3g} GB back for "
            f"each of {self.domains} domains; the busiest process takes {self.seconds:.3g} s for "
            f"those of {self.busiest:.3g} at {self.rate / 1e9:g} GB/s each way"
        )


def link_load(
    config: ModelConfig, deployment: Deployment, gb_per_second: float | None = None
) -> LinkLoad | None:
    """Returns the load of the link between runtimes; None inside one runtime. A process carries
    this many GB/s each way, 0: anything; None: as its transport says."""
    transport = deployment.topology.transport
    if transport is None or not transport.gb_per_second or gb_per_second == 0:
        return None
    from jaxserve.link.dispatch.message import answer_format, message_formats  # imports JAX

    contract = Contract.of(config, deployment)
    messages, answer = message_formats(contract), answer_format(contract)
    widths = [messages[kind].width * messages[kind].word.itemsize for kind in contract.layers]
    slots = deployment.attention.dp * deployment.scheduler.slots * deployment.lanes
    rows = slots * (1 + deployment.drafts)
    back = len(widths) * answer.width * answer.dtype.itemsize
    rate = (gb_per_second or transport.gb_per_second) * 1e9
    return LinkLoad(rows * sum(widths), rows * back, deployment.domains, _busiest(deployment), rate)


def _busiest(deployment: Deployment) -> float:
    """Returns `LinkLoad.busiest`. Processes of a role have its devices in order."""
    attention, ffn = deployment.attention, deployment.ffn
    devices = ffn.devices // ffn.instances  # of one ffn worker
    route = Route(attention.devices, devices)
    each = devices // max(1, ffn.processes)
    landing = Counter(route.ingress(piece)[0] // each for piece in range(attention.devices))
    share = max(landing.values()) / attention.devices
    return max(deployment.domains * share, ffn.instances / max(1, attention.processes))


def check_link(
    config: ModelConfig, deployment: Deployment, gb_per_second: float | None = None
) -> None:
    """Raises ConfigError where the link takes longer than `fleet.tpot_seconds`; see `link_load`."""
    load, target = link_load(config, deployment, gb_per_second), deployment.fleet.tpot_seconds
    if load is not None and target and load.seconds > target:
        raise ConfigError(
            f"fleet.tpot_seconds {target:g}: over link.transport {deployment.link.transport} "
            f"{load}; fewer scheduler.slots, lanes or domains an ffn worker, more ffn.processes, "
            "narrower link.dispatch and link.combine, or one runtime for both roles"
        )
