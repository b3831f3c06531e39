"""`python -m jaxserve.bench machine`: peak rates of a core, as a hardware file of the planner.

One process on one core. Products and reads are timed in core seconds, the least of several calls,
so that other work on the machine matters little; the link is a loopback connection, by the clock.
"""

import argparse
import os
import socket
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import yaml

from jaxserve.bench.report import amount, describe_machine, this_machine
from jaxserve.bench.timing import core_seconds, wall_seconds
from jaxserve.bench.workers import Worker, run_worker
from jaxserve.errors import ConfigError

HELP = "a hardware file of a core of this machine"
SIZE = 1024
"""Rows and columns of the matrices."""
READ_BYTES = 256 * 2**20
"""Larger than any cache."""
SENT_BYTES = 64 * 2**20
CALLS = 9
_SECONDS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="a hardware file, for --hardware"
    )
    parser.add_argument("--price", type=amount, default=0.04, help="USD a core and hour (0.04)")


def run(options: argparse.Namespace) -> int:
    """Measures, prints, and writes the file.

    Raises:
      BenchError: the process that measures failed.
      ConfigError: the file cannot be written.
    """
    if options.write is not None:
        try:  # before anything is measured
            options.write.parent.mkdir(parents=True, exist_ok=True)
            options.write.open("a").close()
        except OSError as error:
            raise ConfigError(f"--write {options.write}: {error.strerror}") from None
    machine = this_machine()
    print(describe_machine(machine), flush=True)
    found = run_worker(Worker(measure, core=min(os.sched_getaffinity(0))), _SECONDS)
    text = hardware_text(machine.cpu, machine.date, machine.cores, found, options.price)
    print(text, end="")
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
    return 0


def hardware_text(cpu: str, date: str, cores: int, found: dict[str, float], price: float) -> str:
    """Formats a hardware file (`planner/hardware.py`) of one core.

    Args:
      found: result of `measure`.
    """
    command = f"python -m jaxserve.bench machine, {cpu}, {date[:10]}"
    tree = {
        "name": f"one core of {cpu}",
        "device_kinds": ["cpu"],
        "price": price,
        "teraflops": {
            name: round(found[name] / 1e12, 4) for name in ("bfloat16", "float32") if name in found
        },
        "memory_gb": round(found["memory"] / cores / 1e9, 1),
        "memory_gb_s": round(found["read"] / 1e9, 1),
        "devices_per_host": cores,
        "link_gb_s": round(found["sent"] / 1e9, 2),
        "link_devices": cores,
        "network_gb_s": round(found["sent"] / 1e9, 2),
        "sources": {
            "price": "a guess, not verified: a rented virtual core, an hour",
            "teraflops": f"{command}: a product of {SIZE} x {SIZE}",
            "memory_gb": "the machine's memory over its cores",
            "memory_gb_s": f"{command}: a sum of {READ_BYTES >> 20} MiB",
            "link_gb_s": f"{command}: a loopback connection",
            "network_gb_s": "as the link: one host",
        },
    }
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def measure() -> dict[str, float]:
    """Measures FLOP/s by format, bytes/s read and sent, and bytes of memory."""
    found: dict[str, float] = {}
    for name in ("bfloat16", "float32"):
        matrix = jnp.full((SIZE, SIZE), 1e-3, name)
        product = jax.jit(jnp.matmul)
        found[name] = 2 * SIZE**3 / min(core_seconds(lambda: product(matrix, matrix), CALLS))  # noqa: B023
    array = jnp.zeros(READ_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    found["read"] = READ_BYTES / min(core_seconds(lambda: total(array), CALLS))
    found["sent"] = SENT_BYTES / min(wall_seconds(_send) for _ in range(CALLS))
    found["memory"] = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return found


def _send() -> None:
    """Sends bytes from one thread to another over a loopback connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname(), timeout=30)
        receiver, _ = server.accept()
    with sender, receiver:
        thread = threading.Thread(target=sender.sendall, args=(bytes(SENT_BYTES),), daemon=True)
        thread.start()
        buffer, left = bytearray(1 << 20), SENT_BYTES
        receiver.settimeout(30)
        while left:
            left -= receiver.recv_into(buffer)
        thread.join(30)
