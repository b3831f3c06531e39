"""One process of a small deployment without a model: what `serve` does with the cluster layer.

Started by the tests with `jaxserve.launch.local --module`. The leader broadcasts a boundary every
few milliseconds; with `--hosts-of 2`, two processes each say that they are on a host of their own.
With `--jax`, each makes one array go round: a transfer to the first ffn device, one more than it
was there, and back.
"""

import argparse
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

from jaxserve.config.load import load_deployment
from jaxserve.errors import EngineFailedError
from jaxserve.fleet import bootstrap, devices, membership
from jaxserve.fleet.arguments import add_arguments, from_arguments
from jaxserve.fleet.control import Boundary, shapes_digest
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import Leader
from jaxserve.roles.layout import Bucket
from jaxserve.roles.written_steps import plan_of_rows


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--follower-set", action="append", default=[])
    parser.add_argument("--hosts-of", type=int, help="processes that are on one host")
    parser.add_argument("--jax", action="store_true")
    parser.add_argument("--collective", action="store_true", help="a sum instead of transfers")
    parser.add_argument("--boundaries", type=int, default=10**9)
    parser.add_argument("--report-after", type=float, default=0.5, help="seconds to say it")
    parser.add_argument("--cut-off", action="store_true", help="end with a transfer on its way")
    parser.add_argument("--jax-heartbeat", type=int, default=100)
    parser.add_argument("--own-devices", type=int, help="of this process, whatever its share is")
    options = parser.parse_args()
    devices._JAX_HEARTBEAT_SECONDS = options.jax_heartbeat
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    arguments = from_arguments(options)
    extra = [] if arguments.is_leader else options.follower_set
    deployment = load_deployment(".", [*options.set, *extra])
    print(f"pid {os.getpid()} cores {sorted(os.sched_getaffinity(0))}", flush=True)
    if options.hosts_of:
        host = f"host{arguments.process_id // options.hosts_of}"
        membership.socket = SimpleNamespace(gethostname=lambda: host)
    if not options.jax:
        bootstrap.initialise = lambda *_: None
        bootstrap.unreachable = lambda *_: ""  # nobody listens as JAX's coordinator
    if options.own_devices:
        devices._set_cpu_devices = lambda *_, **__: jax_config(
            "num_cpu_devices", options.own_devices
        )
    failed = threading.Event()

    def end(failure: EngineFailedError, peers: bootstrap.Peers) -> None:
        if arguments.is_leader:
            failed.set()
        else:
            time.sleep(options.report_after)
            bootstrap.abandon(f"failed: {failure}")

    with bootstrap.joined(arguments, deployment, on_failure=end) as peers:
        device_loop = iter(range(10**9))
        if options.jax:
            device_loop = collective() if options.collective else exchange(options.cut_off)
        if isinstance(peers, Leader):
            lead(peers, device_loop, options, failed)
        else:
            follow(peers, device_loop)
        print("leaving", flush=True)


def jax_config(name: str, value: object) -> None:
    import jax

    jax.config.update(f"jax_{name}", value)


def lead(
    leader: Leader, device_loop: Iterator[int], options: argparse.Namespace, failed: threading.Event
) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())

    def report() -> None:
        """Clients would get UNAVAILABLE here; the main thread may be stuck in a transfer."""
        failed.wait()
        time.sleep(options.report_after)
        assert leader.failure is not None
        bootstrap.abandon(f"failed: {leader.failure}", peers=leader)

    threading.Thread(target=report, daemon=True).start()
    leader.wait_ready()
    print("ready", flush=True)
    try:
        for number in range(options.boundaries):
            plans = [plan_of_rows(0, number, Bucket(8, 4), [[]], slots=4)]
            digest = shapes_digest(leader.identity.digest, plans)
            leader.broadcast(Boundary(number, plans, digest))
            value = next(device_loop)
            if number % 50 == 49:
                print(f"boundary {number} value {value}", flush=True)
            if stop.wait(0.005):
                break
    except Exception as error:  # of JAX too: the peer of a transfer is gone
        print(f"step failed: {type(error).__name__}", flush=True)
        threading.Event().wait(60)
    print("done", flush=True)


def follow(follower: Follower, device_loop: Iterator[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader decides when to end
    current = 0
    follower.position = lambda: f"ffn of lane 0, layer 3, step {current}"
    follower.ready()
    try:
        for boundary in follower.boundaries():
            current = boundary.number
            next(device_loop)
            follower.completed(boundary.number)
    except Exception as error:
        follower.fail(f"{type(error).__name__}: {error}")
        if follower.failure is not None:  # as if a device call did not return: `end` ends it
            threading.Event().wait(60)
        raise


def exchange(cut_off: bool) -> Iterator[int]:
    """Sends one array to the first ffn device and back for each `next`; yields its value.

    With `cut_off` the leader also waits, on a thread, for an array that nobody sends.
    """
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    ends = [min(d.id for d in jax.devices() if d.process_index == process) for process in (0, 1)]
    sharding = [SingleDeviceSharding(d) for end in ends for d in jax.devices() if d.id == end]
    here = jax.process_index()
    print(f"devices {jax.local_device_count()} of {jax.device_count()}", flush=True)

    def absent(process: int) -> jax.Array:
        return jax.make_array_from_single_device_arrays((4,), sharding[process], [], dtype="int32")

    increment = jax.jit(lambda x: x + np.int32(1))
    x = jax.device_put(np.zeros(4, np.int32), sharding[0]) if here == 0 else absent(0)
    while True:
        y = jax.device_put(x, sharding[1])
        y = increment(y) if here == 1 else absent(1)
        x = jax.device_put(y, sharding[0])
        if here == 1:
            y.block_until_ready()
            x = absent(0)
        value = int(x[0]) if here == 0 else 0
        if cut_off and here == 0:
            never = jax.device_put(absent(1), sharding[0])
            threading.Thread(target=never.block_until_ready, daemon=True).start()
            cut_off = False
        yield value


def collective() -> Iterator[int]:
    """For each `next`, the sum of the numbers of all processes, one device each."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    spread = NamedSharding(mesh, PartitionSpec("all"))
    local = np.array([jax.process_index()], np.int32)
    x = jax.make_array_from_process_local_data(spread, local)
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
    while True:
        yield int(total(x).addressable_data(0))


if __name__ == "__main__":
    main()
