"""A leader and followers in one process, over loopback, with short deadlines."""

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

from jaxserve.config.sections import Cluster
from jaxserve.errors import EngineFailedError
from jaxserve.fleet.control import Boundary, Identity, shapes_digest
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import Leader
from jaxserve.roles.layout import Bucket
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows

TOKEN = "a secret"
SHORT = Cluster(start_seconds=10, step_seconds=1.0, heartbeat_seconds=0.5)


def identity(process_id: int, processes: int = 2, **changes: object) -> Identity:
    name = f"process {process_id} ({'ffn' if process_id else 'attention'}, host host{process_id}"
    fields = {
        "worker": f"{name}, pid {1000 + process_id})",
        "process_id": process_id,
        "host": f"host{process_id}",
        "processes": processes,
        "digest": "d1",
        "facts": {"lanes": "2", "attention.dp": "1"},
    }
    return Identity(**(fields | changes))


def boundary(number: int, digest: str = "d1") -> Boundary:
    row = SequenceRow(slot=0, token_ids=[5, 6], kv_length=2, page_ids=[3], sample=True)
    plan = plan_of_rows(0, number, Bucket(8, 4), [[row], []], slots=4)
    return Boundary(number, [plan], shapes_digest(digest, [plan]))


class Ends(contextlib.ExitStack):
    """Starts leaders and followers and closes what is left at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: queue.Queue[EngineFailedError] = queue.Queue()
        self.follower_failures: queue.Queue[EngineFailedError] = queue.Queue()

    def leader(
        self,
        processes: int = 2,
        cluster: Cluster = SHORT,
        address: str = "127.0.0.1:0",
        **options: Any,
    ) -> Leader:
        leader = Leader(
            identity(0, processes),
            address=address,
            token=TOKEN,
            cluster=cluster,
            on_failure=self.failures.put,
            **options,
        )
        leader.start()
        self.callback(leader.close, timeout=0.1)
        return leader

    def follower(
        self,
        leader: Leader,
        process_id: int = 1,
        *,
        token: str = TOKEN,
        cluster: Cluster = SHORT,
        **changes: object,
    ) -> Follower:
        """A follower that is ready to register."""
        follower = Follower(
            identity(process_id, leader.identity.processes, **changes),
            address=leader.address,
            token=token,
            cluster=cluster,
            on_failure=self.follower_failures.put,
        )
        self.callback(follower.close)
        return follower

    def joined(self, leader: Leader, process_id: int = 1) -> Follower:
        """A follower that has registered and is ready."""
        follower = self.follower(leader, process_id)
        follower.register()
        follower.ready()
        return follower


@contextlib.contextmanager
def pair() -> Iterator[tuple[Ends, Leader, Follower]]:
    with Ends() as ends:
        leader = ends.leader()
        follower = ends.joined(leader)
        leader.wait_ready()
        yield ends, leader, follower
