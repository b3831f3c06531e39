"""An attention worker's end of its links to ffn workers that share the ffn role.

Each worker, a shard, has some of the experts (`ffn_shard.py`), gets the rows that these need, and
answers with a share. The attention worker adds the shares up in the order of the shards. A link to
one shard knows nothing of the others: a message that a shard has lost is sent again to that shard,
or to its standby, and the answers of the others are kept meanwhile. A standby is also asked when a
shard is late. Each shard moves its own experts, is asked for itself, and told where its experts
were after a restart (`remote_experts.py`).

Only a process with `ffn.instances` over `pull` imports this module.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from jaxserve.fleet.attention_runtime import PullEnd
from jaxserve.fleet.remote_experts import RemoteExperts
from jaxserve.fleet.role_runtime import RoleRuntime
from jaxserve.link.dispatch.contract import Contract, experts_of
from jaxserve.link.dispatch.ends import ReceiveAnswer
from jaxserve.link.dispatch.message import message_formats
from jaxserve.link.remote.client import LinkCounters, MessageClient
from jaxserve.link.remote.hedging import HedgedClient
from jaxserve.observe.spans import Span
from jaxserve.observe.view import FFNWorkerView
from jaxserve.roles.expert_view import ExpertView
from jaxserve.roles.worker import Action, Proposal

WORTH = 0.5
"""Most of the rows that a shard may need on the mean if they are to be picked out: on loopback,
copies at both ends take as long as half of a message takes on its way."""
LEAST_BYTES = 1 << 16
"""Least bytes of a message whose rows are worth picking out."""


class ShardClients:
    """Sends messages to every shard, and receives their answers; see `MessageClient`.

    Args:
      clients: the links, in the order of the shards.
    """

    def __init__(self, clients: Sequence[MessageClient]):
        self.clients = clients
        self.experts = ShardExperts([_experts(client) for client in clients])

    def connect(self) -> None:
        """Waits until an ffn worker of every shard is up; raises as `MessageClient.connect`."""
        for client in self.clients:
            client.connect()

    def send(self, lane: int, kind: str, layer: int, rows: int, packed: jax.Array) -> None:
        """Sends a lane's message to every shard; never waits."""
        for client in self.clients:
            client.send(lane, kind, layer, rows, packed)

    def receive(self, lane: int) -> list[jax.Array]:
        """Waits for all answers to the lane's message; raises as `MessageClient.receive`."""
        return [client.receive(lane) for client in self.clients]

    def close(self) -> None:
        """Ends all links."""
        for client in self.clients:
            client.close()

    @property
    def counters(self) -> LinkCounters:
        """Counts of all links together."""
        each = [client.counters for client in self.clients]
        failures = [one.last_failure for one in each if one.last_failure]
        sums = _sums(each, "messages", "resends", "failures")
        return LinkCounters(**sums, last_failure="; ".join(failures))

    @property
    def problems(self) -> list[str]:
        """Problems of ffn workers; from any thread."""
        numbered = enumerate(self.clients)
        return [f"shard {n}, {problem}" for n, client in numbered for problem in client.problems]


class OwnRows:
    """Finds the rows of messages that need a shard.

    Args:
      experts: those of the shard.
    """

    def __init__(self, contract: Contract, experts: range):
        self._formats, self._experts = message_formats(contract), experts

    def __call__(self, kind: str, pieces: Sequence[jax.Array]) -> Sequence[bytes]:
        """Returns the rows of each piece, a bit each, once the pieces are computed; none if all
        rows are to be sent."""
        form, masks = self._formats[kind], []
        if not form.top_k or sum(piece.nbytes for piece in pieces) < LEAST_BYTES:
            return ()
        first, words = form.experts_at, form.top_k * 4 // form.word.itemsize
        for piece in map(np.asarray, pieces):
            ids = piece[:, first : first + words].view(np.int32)
            own = ((ids >= self._experts.start) & (ids < self._experts.stop)).any(axis=1)
            own[0] |= not own.any()  # a buffer cannot be empty
            masks.append(own)
        return () if np.all(masks) else [np.packbits(own).tobytes() for own in masks]


class ShardEnd(PullEnd):
    """A `PullEnd` whose answers have an array for each shard."""

    def receiver(self, layer: int, tokens: int, lane: int) -> ReceiveAnswer:
        """Makes the receiver of the answers to a layer's messages."""
        receive: Any = self._client.receive
        return lambda: receive(lane)


def links(
    role: RoleRuntime, link: Callable[[RoleRuntime, Sequence[str]], MessageClient]
) -> ShardClients:
    """Makes the links to all shards.

    Args:
      link: makes a link to any of several equivalent workers, which introduces this worker as one
        that wants the shard of the given role's `instance`.
    """
    ffn, addresses = role.deployment.ffn, role.deployment.link.addresses
    processes = max(1, ffn.processes)
    workers = [addresses[at : at + processes] for at in range(0, len(addresses), processes)]
    clients = []
    for shard in range(ffn.instances):
        own = [address for worker in workers[shard :: ffn.instances] for address in worker]
        clients.append(link(role._replace(instance=shard), own))
        clients[-1].wanted = f"ffn worker of shard {shard}"
        if _needs_few(role, shard):
            experts = experts_of(role.contract.experts, ffn.instances, shard)
            clients[-1].needed = OwnRows(role.contract, experts)
    return ShardClients(clients)


def _needs_few(role: RoleRuntime, shard: int) -> bool:
    """Returns whether a shard needs few of a message's rows, if each expert is chosen as often. The
    first shard computes the shared experts of all rows."""
    layers, shards = role.contract.layers, role.contract.instances
    moe = [role.config.layer(at).ffn for at, kind in enumerate(layers) if kind == "moe"]
    if not shard and any(ffn.d_ff for ffn in moe):
        return False
    # A row reaches the shards of its groups of experts, if a shard has a whole group or a part.
    groups = [(one.top_groups, one.groups) for ffn in moe if (one := ffn.router)]
    reach = max((top / all_ for top, all_ in groups if shards % all_ == 0), default=1.0)
    return reach * (1 - (1 - 1 / (reach * shards)) ** role.contract.top_k) <= WORTH


OF_SHARDS = links, ShardEnd, HedgedClient
"""How links to shards are made, the end that an attention worker has over them, and their class."""


def _experts(client: MessageClient) -> RemoteExperts:
    return RemoteExperts(client.ask, where=lambda: client.last_used)


class ShardExperts:
    """Passes calls on to the experts of every shard, and joins their figures. Ranks and experts are
    numbered shard after shard.

    Args:
      shards: the experts of each shard.
    """

    def __init__(self, shards: Sequence[RemoteExperts]):
        self._shards = shards

    def start(self) -> None:
        """Begins to look."""
        for shard in self._shards:
            shard.start()

    def close(self) -> None:
        """Ends looking."""
        for shard in self._shards:
            shard.close()

    def due(self) -> Sequence[Action]:
        """Nothing."""
        return ()

    def carried_out(self, actions: Sequence[Action]) -> None:
        """Never called with any."""

    def view(self) -> ExpertView:
        """Returns the figures that were found last. How even the shards are among each other shows
        in `loads`; `balance` and `imbalance` are means over the shards."""
        views = [shard.view() for shard in self._shards]
        return ExpertView(
            **_sums(views, "epoch", "moving", "moves", "move_bytes"),
            epoch_seconds=min(view.epoch_seconds for view in views),
            balance=_mean([view.balance for view in views]),
            imbalance=_mean([view.imbalance for view in views]),
            expert_tokens=_side_by_side([view.expert_tokens for view in views]),
            loads=_side_by_side([view.loads for view in views]),
            loads_before=_side_by_side([view.loads_before for view in views]),
        )

    def passes(self, timeout: float) -> tuple[FFNWorkerView, list[Span]]:
        """Returns the work of all shards in use, and their passes that were measured last.

        Raises:
          EngineFailedError: a shard has no ffn worker that answers.
        """
        found = [shard.passes(timeout) for shard in self._shards]
        works = [work for work, _ in found]
        return FFNWorkerView(
            name=", ".join(work.name for work in works),
            misjudged=max(work.misjudged for work in works),
            **_sums(works, "passes", "messages", "rows", "places", "left_behind"),
        ), [span for _, spans in found for span in spans]

    def rebalance(self, *, dry_run: bool) -> Proposal:
        """Rebalances shard by shard up to one that cannot; see `ExpertBalancer.rebalance`."""
        made = [shard.rebalance(dry_run=dry_run) for shard in self._shards]
        return Proposal(
            balance_now=min(one.balance_now for one in made),
            balance_then=min(one.balance_then for one in made),
            gain=max(one.gain for one in made),
            seconds=max(one.seconds for one in made),
            layers=[layer for one in made for layer in one.layers],
            **_sums(made, "moves", "move_bytes"),
        )


def _sums(of: Sequence[msgspec.Struct], *names: str) -> dict[str, Any]:
    return {name: sum(getattr(one, name) for one in of) for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _side_by_side(tables: Sequence[Mapping[int, Sequence[int]]]) -> dict[int, list[int]]:
    """Joins the numbers of each layer, shard after shard."""
    layers = sorted({layer for table in tables for layer in table})
    return {layer: [n for table in tables for n in table.get(layer, ())] for layer in layers}
