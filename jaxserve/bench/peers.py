"""`python -m jaxserve.bench peers`: the time to load weights from a running worker, relative to
loading them from files.

Writes a random BF16 checkpoint with Step-3's proportions. A worker in a process of its own loads it
and serves its weights; this process loads them in turns from files that the page cache has, from
files that it does not have, and from the worker, as floats and in 8 bits: files are quantised
again, the worker's matrices come as they are. Medians of the rounds, over loopback.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax

from jaxserve.bench.load import config_tree, write_checkpoint
from jaxserve.bench.random_model import templates_of
from jaxserve.bench.report import Measure, Part, run_parts
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.peer import PeerCheckpoint, open_weights, weights_hello
from jaxserve.config.load import load_deployment
from jaxserve.errors import EngineFailedError
from jaxserve.link.weights.server import WeightsServer
from jaxserve.model.ffn.placement import home_slots
from jaxserve.roles.attention import AttentionWeights
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.ffn import FFNPrograms, FFNWeights
from jaxserve.roles.held_weights import HeldWeights

FORMATS = ("auto", "int8")
"""Of the weights: as in the files, and quantised."""
PEER_LIMIT = 1.0
_SECONDS = 600.0


class Loaded:
    """The weights of 1A1F, loaded as a worker does it.

    Args:
      peers: of `weights.peers`.
    """

    def __init__(self, folder: Path, weights: str, peers: list[str] | None = None):
        formats = {"attention.weights": weights, "ffn.weights": weights}
        deployment = load_deployment(folder, formats | {"weights.peers": peers or []})
        config, names = read_config(folder)
        self._templates, deployment, meshes = templates_of(deployment, config)
        self.source = open_weights(deployment, names, token="")
        attention = AttentionPrograms(self._templates, deployment, meshes.attention)
        ffn = FFNPrograms(self._templates, deployment, meshes.ffn)
        self._attention = AttentionWeights(self.source, names, attention)
        self._ffn = FFNWeights(self.source, names, ffn)
        jax.block_until_ready([self._attention.layers, self._ffn.layers])

    def held(self) -> HeldWeights:
        """What can be handed out."""
        home = dict.fromkeys(range(len(self._ffn.layers)), home_slots(self._templates.slots))
        slots = SimpleNamespace(changing=contextlib.nullcontext(), placements=home)
        return HeldWeights([*self._attention.held(), *self._ffn.held()], slots)


def serve(folder: Path, weights: str) -> None:
    """A worker that does nothing but hand out its weights, until its input ends."""
    held = Loaded(folder, weights).held()
    hello = weights_hello(str(folder))
    server = WeightsServer("127.0.0.1:0", hello, "", held, bytes_per_second=1e12)
    print(server.start(), flush=True)
    sys.stdin.read()
    server.close()


@contextlib.contextmanager
def worker(folder: Path, weights: str) -> Iterator[str]:
    """The address of such a worker in a process of its own."""
    command = [sys.executable, "-m", "jaxserve.bench.peers", str(folder), weights]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise EngineFailedError("the worker that serves weights did not start")
        yield address
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(_SECONDS)


def forget(folder: Path) -> None:
    """Takes the files out of the page cache."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(quick: bool) -> Part:
    """Loads from files and from a worker, in turns."""
    rounds, measures = (2 if quick else 5), []
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as name:
        folder = Path(name)
        size = write_checkpoint(folder, config_tree(quick))
        for weights in FORMATS:
            ways = ("files", "files, cold", "worker")
            for way in ways:
                seconds[f"{weights}, {way}"] = []
            with worker(folder, weights) as address:
                for number in range(rounds + 1):
                    for way in ways:
                        if way == "files, cold":
                            forget(folder)
                        begin = time.perf_counter()
                        loaded = Loaded(folder, weights, [address] if way == "worker" else [])
                        passed = time.perf_counter() - begin
                        if isinstance(loaded.source, PeerCheckpoint):
                            _check(loaded.source)
                        del loaded
                        if number:  # the first round compiles
                            seconds[f"{weights}, {way}"].append(passed)
            warm, cold, peer = (statistics.median(seconds[f"{weights}, {way}"]) for way in ways)
            called = {"auto": "BF16"}.get(weights, weights.upper())
            measures += [
                Measure(f"{called}: worker ÷ files", peer / warm, limit=PEER_LIMIT),
                Measure(f"{called}: worker ÷ files, not cached", peer / cold),
                Measure(f"  {called}: files", warm, "s"),
                Measure(f"  {called}: files, not cached", cold, "s"),
                Measure(f"  {called}: worker", peer, "s"),
            ]
    notes = [f"{size / 1e9:.2f} GB in BF16, medians of {rounds} rounds in turns, 1A1F, loopback."]
    title = "Load of a worker's weights: from files, and from a running worker"
    return Part("peers", title, measures, notes, {"bytes": size, "seconds": seconds})


def _check(source: PeerCheckpoint) -> None:
    source.close()
    if "storage" in source.arrays:
        raise EngineFailedError(f"weights came from elsewhere, too: {source.arrays}")


def run(quick: bool, json_file: Path | None) -> int:
    """Measures and prints; 1 if a target is missed."""
    _use_cpus()
    return run_parts("peers", {"peers": measure}, ["peers"], quick, json_file)


def _use_cpus() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)


if __name__ == "__main__":
    _use_cpus()
    serve(Path(sys.argv[1]), sys.argv[2])
