"""`python -m jaxserve.bench domains`: independent attention workers on one ffn worker, over `pull`.

The ffn worker and each attention worker are processes. Their stages are stand-ins that sleep, since
two cores cannot compute for four processes: an attention in its worker's loop, a pass in the ffn
worker's thread of passes, a fixed time and one for each message. Everything else is what serving
runs: the link, its frames, the queue and its policy.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import Task, run_workers, wait_until
from jaxserve.link.dispatch.contract import MOST_MESSAGES, MessageSize
from jaxserve.link.remote.client import MessageClient
from jaxserve.link.remote.passes import POLICIES
from jaxserve.link.remote.server import MessageServer
from jaxserve.link.session.hello import make_hello
from jaxserve.ports import free_port

LAYERS, LANES, ROWS, WORDS = 16, 2, 32, 512
STAGES = {"8 ms; 6 + 0.5 ms": (8e-3, 6e-3, 0.5e-3, 1.5), "3 ms; 3 + 1 ms": (3e-3, 3e-3, 1e-3, 1.2)}
"""Attention; pass, fixed and a message; least gain over rotation with three domains."""
_SECONDS, _TOKEN, _PERIOD = 120.0, "bench", 0.2


def measure(quick: bool) -> Iterator[Part]:
    """Runs three domains and one under every policy, and three of which one pauses."""
    measures, details = [], {}
    for name, (*times, limit) in STAGES.items():
        for domains, least in ((3, limit), (1, 0.98)):
            rates = {each: _run(each, domains, times, quick) for each in POLICIES}
            details[f"{name}, {domains} domains"] = rates
            whole = sum(rates["rotation"])
            measures.append(Measure(f"{name}: {domains} domains, rotation", whole, "/s"))
            for batching, wanted in (("merge", None), ("cohort", least)):
                gain = sum(rates[batching]) / whole
                measures.append(Measure(f"  {batching} ÷ rotation", gain, "", wanted, "more"))
            if domains > 1:
                rates["paused"] = _run("cohort", domains, times, quick, 0.5)
                others = sum(rates["paused"][1:]) / sum(rates["cohort"][1:])
                title = "  cohort, one works half of the time: the others ÷ undisturbed"
                measures.append(Measure(title, others, "", 0.95, "more"))
    notes = [f"Messages sent and answered a second; {LANES} lanes, {LAYERS} layers."]
    yield Part("domains", "domains on one ffn worker, stand-in stages", measures, notes, details)


def _run(
    batching: str, domains: int, times: Sequence[float], quick: bool, duty: float = 1.0
) -> list[float]:
    """Returns messages a second of each domain; the first one works for `duty` of the time."""
    own = {"attend": times[0], "seconds": 0.5 if quick else 4.0}
    server = {"batching": batching, "fixed": times[1], "each": times[2]}
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as folder:
        shared = {"address": f"127.0.0.1:{free_port()}", "folder": folder, "domains": domains}
        workers = [Task(serve_messages, shared | server)]
        workers += [
            Task(run_domain, shared | own | {"name": f"{n}", "duty": 1.0 if n else duty})
            for n in range(domains)
        ]
        return run_workers(workers, _SECONDS)[1:]


class _Sleeps:
    """`link.remote.work.Work` that takes its time and returns each message."""

    def __init__(self, fixed: float, each: float):
        self._fixed, self._each = fixed, each

    def ready(self, sizes: Sequence[MessageSize]) -> bool:
        return True

    def compile(self, sizes: Sequence[MessageSize]) -> None: ...

    def warm_up(self, sizes: Sequence[MessageSize]) -> None: ...

    def shapes(self, kind: str, size: MessageSize) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((size.rows, WORDS), np.uint32)] * size.pieces

    def padding(self, kind: str) -> np.ndarray:
        return np.zeros(WORDS, np.uint32)

    def holders(self, pieces: int) -> list[int]:
        return [0] * pieces

    def land(self, kind: str, size: MessageSize, pieces: Sequence[np.ndarray]) -> list[jax.Array]:
        return [jax.device_put(piece) for piece in pieces]

    def run(
        self, kind: str, layer: int, size: MessageSize, messages: Sequence[Sequence[jax.Array]]
    ) -> Sequence[Sequence[jax.Array]]:
        time.sleep(self._fixed + self._each * len(messages))
        return messages


def serve_messages(
    address: str, folder: str, domains: int, batching: str, fixed: float, each: float
) -> None:
    """Serves until all domains have measured."""
    hello, work = make_hello("ffn", {}), _Sleeps(fixed, each)
    policy = POLICIES[batching](MOST_MESSAGES)
    server = MessageServer(address, hello, _TOKEN, work, transport="pull", policy=policy)
    server.start()
    wait_until(lambda: _files(folder, "measured") == domains, _SECONDS, "the other domains")
    wait_until(lambda: not server.domains, _SECONDS, "the end of the domains")
    server.close()


def run_domain(
    address: str, folder: str, domains: int, name: str, attend: float, seconds: float, duty: float
) -> float:
    """Returns messages answered a second while all domains run."""
    mesh = Mesh(np.array([[jax.devices()[0]]]), ("dp", "tp"))
    link = MessageClient(
        [address],
        make_hello("attention", {}),
        _TOKEN,
        domain=name,
        transport="pull",
        mesh=mesh,
        answer_piece=lambda kind, rows: jax.ShapeDtypeStruct((rows, WORDS), np.uint32),
        rows=[ROWS],
    )
    link.connect()
    message = jax.device_put(np.ones((ROWS, WORDS), np.uint32))
    Path(folder, f"{name}.joined").touch()
    wait_until(lambda: _files(folder, "joined") == domains, _SECONDS, "the other domains")
    begun = ended = count = 0.0
    warm, measured = time.monotonic() + seconds / 2, Path(folder, f"{name}.measured")
    for number in itertools.count():
        for lane in range(LANES):
            if number:
                link.receive(lane)
            time.sleep(attend)
            part = time.monotonic() % _PERIOD
            time.sleep(_PERIOD - part if part > duty * _PERIOD else 0.0)
            link.send(lane, "moe", number % LAYERS, ROWS, message)
        now = time.monotonic()
        if not begun and now > warm:
            begun, count = now, link.counters.messages
        if begun and not ended and now > begun + seconds:
            ended, count = now, link.counters.messages - count
            measured.touch()
        # Those that have measured go on, so that the others are measured beside them.
        if ended and _files(folder, "measured") == domains:
            link.close()
            return count / (ended - begun)
    raise AssertionError


def _files(folder: str, kind: str) -> int:
    return len(list(Path(folder).glob(f"*.{kind}")))
