"""What every test runs under: simulated CPU devices, a compile cache, strict dtypes.

No accelerator is touched: JAX is told so before anything imports it. Warnings are errors
(`filterwarnings` in pyproject.toml), and the functions of both packages are checked against their
annotations (`--jaxtyping-packages`, `typechecker.py`).
"""

import os
from pathlib import Path

import hypothesis

import tests.typechecker  # noqa: F401  (the import hook finds it by its name, already loaded)

SIMULATED_DEVICES = 8
REPOSITORY = Path(__file__).resolve().parent.parent

# JAX writes a cache entry in place, so a second process could read half of one: every xdist
# worker has a cache of its own. Processes that tests start inherit both settings.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(REPOSITORY / "build" / "jax_cache" / _WORKER)
# Tests start processes from one in which gRPC runs; its handlers would revive it in the child.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax  # noqa: E402  (after the platform is chosen)

jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")
