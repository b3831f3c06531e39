"""Computes the bytes that cross between an attention runtime and an ffn runtime in a step, and the
least time that the link takes for them. Used by `serve --check`; needs no device."""

from typing import NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.message import answer_format, message_formats


class LinkLoad(NamedTuple):
    """Load of a decode step on a link between runtimes, with every slot in use."""

    there: int
    """Bytes of a domain's messages, all layers together."""
    back: int
    """Bytes of the answers to them."""
    domains: int
    """Domains that share the ffn worker, whose end carries the rows of all of them."""
    rate: float
    """Bytes a second that a process carries each way."""

    @property
    def seconds(self) -> float:
        """Least time between two tokens of a sequence."""
        return self.domains * max(self.there, self.back) / self.rate

    def __str__(self) -> str:
        return (
            f"a step moves {self.there / 1e9:.3g} GB there and {self.back / 1e9:.3g} GB back for "
            f"each of {self.domains} domains, {self.seconds:.3g} s at {self.rate / 1e9:g} GB/s "
            "each way"
        )


def link_load(config: ModelConfig, deployment: Deployment) -> LinkLoad | None:
    """Returns the load of the link between runtimes; None inside one runtime."""
    transport = deployment.topology.transport
    if transport is None or not transport.gb_per_second:
        return None
    contract = Contract.of(config, deployment)
    messages, answer = message_formats(contract), answer_format(contract)
    widths = [messages[kind].width * messages[kind].word.itemsize for kind in contract.layers]
    slots = deployment.attention.dp * deployment.scheduler.slots * deployment.lanes
    rows = slots * (1 + deployment.drafts)
    back = len(widths) * answer.width * answer.dtype.itemsize
    return LinkLoad(
        rows * sum(widths), rows * back, deployment.domains, transport.gb_per_second * 1e9
    )


def check_link(config: ModelConfig, deployment: Deployment) -> None:
    """Raises ConfigError where the link takes longer than `fleet.tpot_seconds` allows."""
    load, target = link_load(config, deployment), deployment.fleet.tpot_seconds
    if load is not None and target and load.seconds > target:
        raise ConfigError(
            f"fleet.tpot_seconds {target:g}: over link.transport {deployment.link.transport} "
            f"{load}; fewer scheduler.slots, lanes or domains an ffn worker, narrower "
            "link.dispatch and link.combine, or one runtime for both roles"
        )
