"""Probes what JAX can do on this host: `python -m jaxserve.commands.doctor_probe`.

`doctor.py` runs it as a process of its own, with a deadline: a backend that hangs (a TPU which
another process holds), aborts or floods the terminal then costs one line of the report. Prints one
JSON object; a failed probe has the text of its error in place of a result.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from jaxserve.config.topology import BETWEEN, INSIDE
from jaxserve.fleet.hardware import choose_platform

SIMULATED = 2
"""Default number of simulated CPU devices: enough to try the links between devices."""
_PULLED_BYTES = 1 << 14
"""Less than a connection buffers: one thread sends and receives."""


def probe() -> dict[str, Any]:
    """Platform, devices, and what each kind of link said when it was tried.

    Returns:
      platform, kind, devices, `memory` in bytes of a device (None: it does not say), the backend of
      the kernels, and by link true, or why not.
    """
    import jax

    if choose_platform() == "cpu" and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", SIMULATED)

    from pallas_kernels.target import target_of

    devices = jax.local_devices()
    first = devices[0]
    statistics = first.memory_stats() or {}
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "devices": len(devices),
        "memory": statistics.get("bytes_limit"),
        "kernels": target_of(first.platform, first.device_kind).backend,
        "links": {
            name: _tried(try_, name) if len(devices) >= count else "needs two devices"
            for names, count, try_ in ((INSIDE, 2, _inside), (BETWEEN, 1, _between))
            for name in names
        },
    }


def _tried(step: Callable[[str], None], name: str) -> bool | str:
    try:
        step(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return True


def _inside(transport: str) -> None:
    """Moves rows from one device to another inside this runtime."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jaxserve.link.dispatch.ends import piece_sharding
    from jaxserve.link.dispatch.route import Route
    from jaxserve.link.transports import opens

    here, there = (Mesh(np.asarray([[one]]), ("x", "y")) for one in jax.local_devices()[:2])
    rows = np.arange(1024, dtype=np.int32).reshape(2, -1)
    way = opens(transport)("dispatch", Route(1, 1), here, there, rows.shape, rows.dtype)
    way.sender()(jax.device_put(rows, piece_sharding(here)))
    _same(way.receiver()()[0], rows)


def _between(transport: str) -> None:
    """Moves rows from one end of a connection to the other, both of this process."""
    import jax
    import msgspec
    import numpy as np

    from jaxserve.link.session.channel import Channel
    from jaxserve.link.session.listener import listen
    from jaxserve.link.session.messages import Bulk
    from jaxserve.link.transports import opens

    rows = np.arange(_PULLED_BYTES // 4, dtype=np.int32)
    with listen("127.0.0.1:0", "") as listening:
        sender = Channel(socket.create_connection(listening.getsockname()))
        receiver = Channel(listening.accept()[0])
    opens(transport)(sender).send(msgspec.msgpack.encode, [jax.device_put(rows)])
    bulk = msgspec.msgpack.decode(receiver.receive(), type=Bulk)
    shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    _same(opens(transport)(receiver).receive(bulk, [shape])[0], rows)
    sender.close()
    receiver.close()


def _same(got: Any, wanted: Any) -> None:
    import numpy as np

    if not np.array_equal(np.asarray(got), wanted):
        raise ValueError("other bytes arrived than were sent")


if __name__ == "__main__":
    # JAX's own lines go to stderr; only the report is on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        found = probe()
    print(json.dumps(found), flush=True)
    os._exit(0)  # an ordinary exit would wait for devices
