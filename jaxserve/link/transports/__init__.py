"""The ways in which messages cross, one file each.

A file declares its transport (`TRANSPORT`, which `config/topology.py` reads) and names the class
that `OPENS` one end of it: a `MeshTransport` inside a runtime, a class like `PullTransfers` between
runtimes. Nothing else knows the names.
"""

import importlib
from typing import Any


def opens(name: str) -> Any:
    """Returns the class that opens a transport; only its file is imported."""
    return importlib.import_module(f"{__name__}.{name}").OPENS
