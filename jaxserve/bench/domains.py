"""(a) of `bench fleet`: throughput of two domains on one ffn worker over that of one, over `pull`.

Processes of their own: one ffn worker, and one attention worker a domain. The stages are stand-ins
of a fixed duration in which a core is free, because a host with two cores has none for a third
process: an attend sleeps in the attention worker's loop, an ffn in the server's turn, so each role
does one stage at a time, as a device would. All else is what serving runs: the order of stages
(`roles/schedule.py`), the cell, the link with its notes, pulls and gate, and the server's rotation.

Run by `fleet.py` as workers.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import BenchError, Worker, run_workers, writing
from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.remote.client import PullClient
from jaxserve.link.remote.server import PullServer
from jaxserve.link.session.channel import Deadlines
from jaxserve.link.session.hello import make_hello
from jaxserve.ports import free_port
from jaxserve.roles.cell import Cell, Workers
from jaxserve.roles.layout import Bucket
from jaxserve.roles.schedule import Rotation
from jaxserve.roles.worker import Passed

MODULE = "jaxserve.bench.domains"
ATTEND_SECONDS, FFN_SECONDS = 8e-3, 4e-3
"""The ffn stage takes half of the attend: two domains can just about fill it."""
LAYERS, LANES = 16, 2
ROWS, WORDS = 32, 512
"""Of a message, 64 KB."""
DOMAINS = (1, 2)
LIMIT = 1.7
_RUN_SECONDS, _MEET_SECONDS = 180.0, 90.0
_TOKEN = "bench"


def measure(quick: bool) -> Part:
    """Runs one and two domains in turn; starts no JAX in this process."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise BenchError("domains: needs two cores")
    layers: dict[int, list[float]] = {count: [] for count in DOMAINS}
    for _ in range(1 if quick else 4):
        for count in DOMAINS:
            layers[count].append(_run(count, cores, steps=4 if quick else 20))
    one, two = (max(layers[count]) for count in DOMAINS)
    ideal = min(2.0, ATTEND_SECONDS / FFN_SECONDS)
    measures = [
        Measure("2 domains ÷ 1 domain", two / one, "", LIMIT, "more"),
        Measure("  ideal of these stages", ideal),
        Measure("1 domain, layers of a lane a second", one, "/s"),
        Measure("  of what its attends allow", one * ATTEND_SECONDS),
        Measure("2 domains, layers of a lane a second", two, "/s"),
        Measure("  time of the ffn worker in ffn stages", two * FFN_SECONDS),
    ]
    notes = [
        f"Stand-in stages: attend {ATTEND_SECONDS * 1e3:g} ms, ffn {FFN_SECONDS * 1e3:g} ms; each "
        f"sleeps, one at a time on its role. {LANES} lanes a domain, {ROWS * WORDS * 4 >> 10} KB a "
        "message.",
        "Processes pinned: the domains to one core, the ffn worker to the other. The best of "
        "several rounds each: what else runs only makes them slower.",
    ]
    title = "(a) two domains on one ffn worker, over pull"
    return Part("domains", title, measures, notes, {"layers_a_second": layers})


def _run(domains: int, cores: Sequence[int], steps: int) -> float:
    """Layers of a lane that all domains together finish a second."""
    address = f"127.0.0.1:{free_port()}"
    with TemporaryDirectory(prefix="jaxserve-bench-") as folder:
        shared = ["--address", address, "--domains", str(domains), "--folder", folder]
        workers = [Worker(MODULE, ["ffn", *shared], {}, cores[1])]
        workers += [
            Worker(MODULE, [str(domain), *shared, "--steps", str(steps)], {}, cores[0])
            for domain in range(domains)
        ]
        found = run_workers(workers, _RUN_SECONDS)[1:]
    return sum(one["layers"] / one["seconds"] for one in found)


class _Step(NamedTuple):
    """As much of a step as a cell looks at."""

    domain: int
    lane: int
    number: int
    bucket: Bucket = Bucket(ROWS, 1)


class _Attention:
    """An attention worker's stages, of fixed duration."""

    def __init__(self, link: PullClient, message: jax.Array):
        self._link, self._message = link, message

    def begin(self, step: _Step) -> Iterator[jax.Array | Passed | None]:
        answer, lane = self._message, step.lane
        for layer in range(LAYERS):
            time.sleep(ATTEND_SECONDS)
            yield self._message
            self._link.send(lane, "moe", layer, ROWS, self._message)
            yield None
            answer = self._link.receive(lane)
            yield answer
        yield Passed(answer)


class _FFN:
    """An ffn worker that takes its time and returns what it got (`link.work.Work`)."""

    def __init__(self, device: jax.Device):
        self._sharding = SingleDeviceSharding(device)

    def ready(self, sizes: Sequence[MessageSize]) -> bool:
        return True

    def compile(self, sizes: Sequence[MessageSize]) -> None:
        pass

    def warm_up(self, sizes: Sequence[MessageSize]) -> None:
        pass

    def shapes(self, kind: str, size: MessageSize) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((size.rows, WORDS), "uint32", sharding=self._sharding)]

    def run(
        self, kind: str, layer: int, size: MessageSize, message: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        time.sleep(FFN_SECONDS)
        return message


def serve_messages(options: argparse.Namespace) -> dict[str, Any]:
    """The ffn worker, until all domains have come and gone."""
    device = jax.devices()[0]
    server = PullServer(
        options.address,
        make_hello("ffn", {}),
        _TOKEN,
        _FFN(device),
        mesh=Mesh(np.array([[device]]), ("ep", "tp")),
    )
    server.start()
    _wait(lambda: len(server.domains) == options.domains)
    _wait(lambda: not server.domains)
    server.close()
    return {}


def run_domain(options: argparse.Namespace) -> dict[str, Any]:
    """One domain: steps on all lanes once all domains are there."""
    device = jax.devices()[0]
    sharding = SingleDeviceSharding(device)
    shape = jax.ShapeDtypeStruct((ROWS, WORDS), "uint32", sharding=sharding)
    link = PullClient(
        [options.address],
        make_hello("attention", {}),
        _TOKEN,
        domain=options.role,
        mesh=Mesh(np.array([[device]]), ("dp", "tp")),
        answer_shape=lambda kind, rows: shape,
        rows=[ROWS],
        deadlines=Deadlines(absent=_MEET_SECONDS),
    )
    link.connect()
    message = jax.device_put(np.ones((ROWS, WORDS), np.uint32), sharding)
    workers = Workers(attention=(cast(Any, _Attention(link, message)),))
    cell = Cell(workers, Rotation(LAYERS, LANES, gated=True), LANES)
    run_steps(cell, 1)
    folder = Path(options.folder)
    (folder / options.role).touch()
    _wait(lambda: len(list(folder.iterdir())) >= options.domains)
    began = time.perf_counter()
    run_steps(cell, options.steps)
    seconds = time.perf_counter() - began
    (folder / f"{options.role} has measured").touch()
    # Whoever is first goes on, so that the others are measured beside it.
    while len(list(folder.iterdir())) < 2 * options.domains:
        run_steps(cell, 1)
    link.close()
    return {"layers": options.steps * LANES * LAYERS, "seconds": seconds}


def run_steps(cell: Cell, steps: int) -> None:
    """So many steps on every lane; a lane that has left begins anew."""
    left = dict.fromkeys(range(LANES), steps - 1)
    for lane in left:
        cell.begin(_Step(0, lane, 0))
    while cell.active:
        cell.advance()
        assert cell.at is not None
        lane = cell.at.lane
        if left[lane]:
            left[lane] -= 1
            cell.begin(_Step(0, lane, 0))


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + _MEET_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"domains: waited for more than {_MEET_SECONDS:g} s")
        time.sleep(0.005)


def main() -> None:
    """The workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", help="ffn, or the number of a domain")
    parser.add_argument("--address", required=True)
    parser.add_argument("--domains", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    with writing(options.result) as result:
        result |= serve_messages(options) if options.role == "ffn" else run_domain(options)


if __name__ == "__main__":
    main()
