"""`python -m jaxserve.bench peers`: the time to load weights from a running worker, relative to
loading them from files.

Writes a random BF16 checkpoint with Step-3's proportions. A worker in a process of its own loads it
and serves its weights; another process loads them in turns from files in the page cache, from files
outside it, and from the worker, as floats and in 8 bits: files are quantised again, the worker's
matrices come as they are. Medians of the rounds, over loopback.
"""

import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from jaxserve.bench.load import Loaded, config_tree, write_checkpoint
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.timing import take_turns, wall_seconds
from jaxserve.bench.workers import BenchError, Helper, Worker, run_worker, say
from jaxserve.checkpoint.peer import PeerCheckpoint, weights_hello
from jaxserve.link.weights.server import WeightsServer
from jaxserve.model.ffn.placement import home_slots
from jaxserve.roles.held_weights import HeldWeights

WAYS = ("files", "files, cold", "worker")
FORMATS = ("auto", "int8")
"""Formats of the weights: as in the files, and quantised."""
PEER_LIMIT = 1.0
_SECONDS = 600.0


def load_in(weights: str, folder: Path, peers: Sequence[str] = ()) -> Loaded:
    """Loads both roles with weights in a number format, from `peers` unless that is empty."""
    formats = {"mode": "afd", "attention.weights": weights, "ffn.weights": weights}
    return Loaded(folder, formats | {"weights.peers": list(peers)})


def held_by(loaded: Loaded) -> HeldWeights:
    """Returns the weights that a worker can hand out."""
    home = dict.fromkeys(range(len(loaded.ffn.layers)), home_slots(loaded.templates.slots))
    slots = SimpleNamespace(changing=contextlib.nullcontext(), placements=home)
    return HeldWeights([*loaded.attention.held(), *loaded.ffn.held()], slots)


def serve(folder: str, weights: str) -> None:
    """In a helper: hands out weights until standard input ends; says its address."""
    held = held_by(load_in(weights, Path(folder)))
    server = WeightsServer("127.0.0.1:0", weights_hello(folder), "", held, bytes_per_second=1e12)
    say(server.start())
    sys.stdin.read()
    server.close()


def forget(folder: Path) -> None:
    """Takes the files out of the page cache."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(quick: bool) -> Iterator[Part]:
    """Measures in a process with two devices."""
    seconds, size = run_worker(Worker(measure_ways, {"quick": quick}, devices=2), _SECONDS)
    yield part_of(seconds, size)


def measure_ways(quick: bool) -> tuple[dict[str, list[float]], int]:
    """Loads from files and from a worker, in turns. Returns the seconds by format and way, and the
    bytes of the files."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as name:
        folder = Path(name)
        size = write_checkpoint(folder, config_tree(quick))
        for weights in FORMATS:
            server = Worker(serve, {"folder": name, "weights": weights})
            with Helper(server.command(), _SECONDS) as helper:
                address = helper.answer()
                ways: dict[str, Callable[[], float]] = {
                    "files": lambda: wall_seconds(lambda: load_in(weights, folder)),  # noqa: B023
                    "files, cold": lambda: from_cold_files(folder, weights),  # noqa: B023
                    "worker": lambda: from_worker(folder, weights, address),  # noqa: B023
                }
                found = take_turns(ways, 2 if quick else 5)  # the round before compiles
            seconds |= {f"{weights}, {way}": values for way, values in found.items()}
    return seconds, size


def from_cold_files(folder: Path, weights: str) -> float:
    """Seconds of loading files that the page cache does not have."""
    forget(folder)
    return wall_seconds(lambda: load_in(weights, folder))


def from_worker(folder: Path, weights: str, address: str) -> float:
    """Seconds of loading from a worker.

    Raises:
      BenchError: an array came from elsewhere.
    """
    loaded: list[Loaded] = []
    seconds = wall_seconds(lambda: loaded.append(load_in(weights, folder, [address])))
    source = loaded[0].source
    assert isinstance(source, PeerCheckpoint)
    source.close()
    if "storage" in source.arrays:
        raise BenchError(f"weights came from elsewhere, too: {source.arrays}")
    return seconds


def part_of(seconds: Mapping[str, Sequence[float]], size: int) -> Part:
    """Builds the report of the seconds by format and way."""
    measures = []
    for weights in FORMATS:
        warm, cold, peer = (statistics.median(seconds[f"{weights}, {way}"]) for way in WAYS)
        called = {"auto": "BF16"}.get(weights, weights.upper())
        measures += [
            Measure(f"{called}: worker ÷ files", peer / warm, limit=PEER_LIMIT),
            Measure(f"{called}: worker ÷ files, not cached", peer / cold),
            Measure(f"  {called}: files", warm, "s"),
            Measure(f"  {called}: files, not cached", cold, "s"),
            Measure(f"  {called}: worker", peer, "s"),
        ]
    rounds = len(seconds["auto, files"])
    notes = [f"{size / 1e9:.2f} GB in BF16, medians of {rounds} rounds in turns, 1A1F, loopback."]
    title = "Load of a worker's weights: from files, and from a running worker"
    return Part("peers", title, measures, notes, {"bytes": size, "seconds": seconds})
