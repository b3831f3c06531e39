"""What JAX can do on this host, found out by trying: `python -m jaxserve.commands.doctor_probe`.

`doctor.py` runs it as a process of its own, with a deadline: a backend that hangs (a TPU which
another process holds), aborts or floods the terminal then costs one line of the report. Prints one
JSON object; what could not be done is an error's text in place of its result.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxserve.fleet.hardware import choose_platform

SIMULATED = 2
"""CPU devices, where nobody asked for a number: enough to try the links between devices."""
_PULLED_BYTES = 1 << 16


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
            "device_put": _tried(_device_put) if len(devices) > 1 else "needs two devices",
            "ppermute": _tried(_ppermute) if len(devices) > 1 else "needs two devices",
            "pull": _tried(_pull),
        },
    }


def _tried(step: Callable[[], None]) -> bool | str:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return True


def _device_put() -> None:
    import jax
    import numpy as np

    source, target = jax.local_devices()[:2]
    rows = np.arange(1024, dtype=np.int32)
    moved = jax.device_put(jax.device_put(rows, source), target)
    _same(moved, rows)


def _ppermute() -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.asarray(jax.local_devices()[:2]), ("x",))
    rows = np.arange(1024, dtype=np.int32)
    turned = jax.jit(
        jax.shard_map(
            lambda part: jax.lax.ppermute(part, "x", [(0, 1), (1, 0)]),
            mesh=mesh,
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec("x"),
        )
    )(jax.device_put(rows, NamedSharding(mesh, PartitionSpec("x"))))
    _same(turned, np.roll(rows, 512))


def _pull() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxserve.link.transports.pull import Transfers

    device = jax.local_devices()[0]
    sender, receiver = Transfers(device, "127.0.0.1"), Transfers(device, "127.0.0.1")
    sender.connect(receiver.address)
    receiver.connect(sender.address)
    rows = np.arange(_PULLED_BYTES // 4, dtype=np.int32)
    sender.register(1, [jax.device_put(rows, device)])
    sharding = jax.sharding.SingleDeviceSharding(device)
    (arrived,) = receiver.pull(1, [jax.ShapeDtypeStruct(rows.shape, jnp.int32, sharding=sharding)])
    _same(arrived, rows)


def _same(got: Any, wanted: Any) -> None:
    import numpy as np

    if not np.array_equal(np.asarray(got), wanted):
        raise ValueError("other bytes arrived than were sent")


if __name__ == "__main__":
    # JAX's own lines go to stderr; only the report is on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        found = probe()
    print(json.dumps(found), flush=True)
    os._exit(0)  # an ordinary exit would wait for the transfer servers
