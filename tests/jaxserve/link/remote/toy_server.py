"""Toy ffn workers in processes of their own: each answers `2 x + layer` to every message.

One process imports JAX and forks a worker for every line of options it reads, because a start of
0.2 s makes killing cheap. It has started neither a backend nor a thread by then.
"""

import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.jaxserve.waiting import until

DEVICES = 2
ROWS, WORDS = 4, 32
"""Shape of a piece of most messages; compiled before a worker serves."""
UNKNOWN_ROWS, UNFIT_ROWS = 5, 6
"""For the first it gets ready when it is asked, and for the second it cannot."""
BULK_ROWS = 16
FACTS = {"model": "toy", "layers": "4"}
WORD = "int32"
DEADLINES = {"handshake": 10.0, "probe": 0.25, "suspect": 1.5, "down": 3.0, "absent": 30.0}
REFUSED_LAYER = 9


def kind_of(pieces: int, words: int) -> str:
    """Name of a kind of message, from which its shape follows; a piece has `ROWS` rows."""
    return f"{pieces}x{words}"


def in_use(link: Any) -> str | None:
    """Address of the server that gets the messages; None before and after a loss."""
    active = link._active
    return next((peer.address for peer in link.peers if peer.connection in active), None)


def message_client(
    addresses, mesh, rows, *, domain="d0", facts=FACTS, token="secret", deadlines=None
):
    """A client of toy servers that is not connected yet."""
    import jax

    from jaxserve.link.remote.client import MessageClient
    from jaxserve.link.session.channel import Deadlines
    from jaxserve.link.session.hello import make_hello

    return MessageClient(
        addresses,
        make_hello("attention", facts),
        token,
        domain=domain,
        transport="pull",
        mesh=mesh,
        answer_piece=lambda kind, rows: jax.ShapeDtypeStruct((rows, int(kind.split("x")[1])), WORD),
        rows=rows,
        deadlines=Deadlines(**DEADLINES | (deadlines or {})),
    )


class ToyServer:
    """A worker; keeps its address when it is started again."""

    def __init__(self, nursery: "Nursery", **options):
        self._nursery, self.options = nursery, options
        self._folder = Path(tempfile.mkdtemp(dir=nursery.folder))
        self.pid = 0
        self.start()

    def start(self) -> None:
        """Does not wait until it serves."""
        (self._folder / "address").unlink(missing_ok=True)
        self.pid = self._nursery.ask({**self.options, "folder": str(self._folder)})

    def ready(self) -> "ToyServer":
        """Waits until it serves."""
        until((self._folder / "address").exists)
        self.address = (self._folder / "address").read_text()
        self.options["address"] = self.address
        return self

    def send_signal(self, number: int) -> None:
        """Sends a signal; a process that is to stop has stopped then."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            stat = Path(f"/proc/{self.pid}/stat")
            until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends it, and returns its exit status, negative where a signal ended it."""
        self.send_signal(number)
        self.send_signal(signal.SIGCONT)
        status, self.pid = self._nursery.ask({"wait": self.pid}), 0
        return os.waitstatus_to_exitcode(status)

    def report(self) -> tuple[list[str], int]:
        """Domains that are connected, and bytes of its arrays; up to 0.1 s old."""
        domains, live = (self._folder / "report").read_text().splitlines()
        return domains.split(), int(live)


class ToyClient:
    """An attention worker `doomed` that sends to a server without end, until it is killed."""

    def __init__(self, nursery: "Nursery", server: ToyServer):
        self._nursery = nursery
        self._pid = nursery.ask({"client_of": server.address})

    def send_signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self._nursery.ask({"wait": self._pid})


class Nursery:
    """The process that forks workers."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._asking = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.jaxserve.link.remote.toy_server"],
            cwd=Path(__file__).resolve().parents[4],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, options: dict) -> int:
        with self._asking:
            self._process.stdin.write(json.dumps(options) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    @contextlib.contextmanager
    def servers(self, *options: dict) -> Iterator[list[ToyServer]]:
        """Workers, killed at the end where the test has not ended them."""
        started: list[ToyServer] = []
        try:
            started += [ToyServer(self, **one) for one in options]
            yield [server.ready() for server in started]
        finally:
            for server in started:
                if server.pid:
                    server.end(signal.SIGKILL)

    def close(self) -> None:
        self._process.communicate(timeout=60.0)


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Nursery(Path(folder))) as one:
        yield one


def serve(options: dict) -> None:
    """Runs a worker's process until SIGTERM."""
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)

    import numpy as np

    from jaxserve.link.remote.cohorts import Cohorts
    from jaxserve.link.remote.server import HELPERS, MessageServer
    from jaxserve.link.session.channel import Deadlines
    from jaxserve.link.session.hello import make_hello

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())

    class Toy:
        """`link.work.Work`."""

        known = frozenset({ROWS, BULK_ROWS})

        def ready(self, sizes) -> bool:
            return all(size.rows in self.known for size in sizes)

        def compile(self, sizes) -> None:
            time.sleep(options.get("compile_seconds", 0.5))
            if any(size.rows == UNFIT_ROWS for size in sizes):
                raise ValueError(f"{UNFIT_ROWS} rows do not fit")
            for size in sizes:
                zeros = [np.zeros((size.rows, WORDS), WORD)] * DEVICES
                jax.block_until_ready(self.run("", 0, size, [self.land("", size, zeros)]))

        def warm_up(self, sizes) -> None:
            self.known = self.known | {size.rows for size in sizes}

        def shapes(self, kind: str, size) -> list[jax.ShapeDtypeStruct]:
            pieces, words = map(int, kind.split("x"))
            assert pieces == size.pieces
            return [jax.ShapeDtypeStruct((size.rows, words), WORD)] * pieces

        def padding(self, kind: str) -> np.ndarray:
            return np.full(int(kind.split("x")[1]), -1, WORD)

        def holders(self, pieces: int) -> list[int]:
            return [0] * pieces

        def land(self, kind: str, size, pieces) -> list[jax.Array]:
            """Pieces land on the devices in turn."""
            return list(map(jax.device_put, pieces, itertools.cycle(jax.devices())))

        def run(self, kind: str, layer: int, size, messages) -> list[list[jax.Array]]:
            if layer == REFUSED_LAYER:
                raise ValueError(f"no layer {layer} here")
            if layer == options.get("stuck_layer"):
                threading.Event().wait()
            return [[double(piece, np.int32(layer)) for piece in message] for message in messages]

    @jax.jit
    def double(x: jax.Array, layer: jax.Array) -> jax.Array:
        return 2 * x + layer

    warm = np.zeros((ROWS, WORDS), WORD)
    jax.block_until_ready([double(jax.device_put(warm, d), np.int32(0)) for d in jax.devices()])
    server = MessageServer(
        options.get("address", "127.0.0.1:0"),
        make_hello("ffn", FACTS),
        "secret",
        Toy(),
        transport="pull",
        policy=Cohorts(16) if options.get("cohorts") else None,
        deadlines=Deadlines(**DEADLINES | options.get("deadlines", {})),
    )
    folder = Path(options["folder"])

    def write(name: str, text: str) -> None:
        (folder / f"{name}.new").write_text(text)
        os.replace(folder / f"{name}.new", folder / name)

    gc.disable()  # An idle worker collects nothing, so what it lets go must be without cycles.

    def report() -> None:
        live = sum(array.nbytes for array in jax.live_arrays())
        write("report", f"{' '.join(server.domains)}\n{live}\n")

    report()
    write("address", server.start())
    assert len(server.helpers._threads) == HELPERS  # growth of a process's threads is a leak
    while not ended.wait(0.1):
        report()
    server.close()
    ended_threads = {"link passes", "link reader"}  # one inside JAX would abort the process
    assert ended_threads.isdisjoint(thread.name for thread in threading.enumerate())


def keep_sending(options: dict) -> None:
    """Runs a doomed client's process: 1 MB on each of three lanes, again and again."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    words = 1 << 14
    device = jax.devices()[0]
    mesh = Mesh(np.array([[device]]), ("dp", "tp"))
    link = message_client([options["client_of"]], mesh, [BULK_ROWS], domain="doomed")
    link.connect()
    message = jax.device_put(np.ones((BULK_ROWS, words), WORD), device)
    for round_number in itertools.count():
        for lane in range(3):
            if round_number:
                link.receive(lane)
            link.send(lane, kind_of(1, words), lane, BULK_ROWS, message)


def main() -> None:
    import jax  # noqa: F401  (what every worker would import)

    import jaxserve.link.remote.client
    import jaxserve.link.remote.server  # noqa: F401

    for line in sys.stdin:
        options = json.loads(line)
        if "wait" in options:
            answer = os.waitpid(options["wait"], 0)[1]
        else:
            answer = os.fork()
            if answer == 0:
                return keep_sending(options) if "client_of" in options else serve(options)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
