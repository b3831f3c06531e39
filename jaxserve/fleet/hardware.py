"""Which accelerator JAX will find on this host, told without starting a JAX backend.

Called by `devices.py`, which has to know before JAX starts whether devices are simulated on the
CPU. An installed plugin is not hardware: the tests need libtpu for compilation alone, and JAX then
spends seconds on looking for a TPU that is not there. Knows nothing of deployments.
"""

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

_PLUGINS = {"tpu": ("libtpu",), "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
_NAMES = {"tpu": "TPU", "cuda": "NVIDIA GPU"}
_GOOGLE = "0x1ae0"
_STORAGE_OR_NETWORK = ("0x01", "0x02")
"""PCI classes in which Google's vendor id is no TPU: virtual machines have its disks and NICs."""
_TPU_VARIABLES = ("TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "TPU_NAME")
"""Variables that Google Kubernetes Engine and TPU VMs set; containers may see no PCI bus."""


def expected_platform() -> str:
    """The platform that JAX will choose: "cpu", "tpu", "cuda", or what JAX_PLATFORMS says first."""
    if platforms := jax.config.jax_platforms:
        return str(platforms.split(",")[0])
    return detect_platform()


def choose_platform() -> str:
    """Returns `expected_platform`, and keeps JAX from looking for absent accelerators.

    Call it before JAX starts a backend; later it changes nothing.
    """
    platform = expected_platform()
    if platform == "cpu" and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    return platform


def detect_platform(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    installed: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
) -> str:
    """Returns "tpu" or "cuda" where this host has the hardware and JAX's plugin, else "cpu".

    Args:
      root: folder of /dev and /sys.
      installed: whether a Python module can be imported.
    """
    present = {"tpu": _has_tpu(root, environment), "cuda": _has_nvidia_gpu(root, environment)}
    found = [platform for platform, there in present.items() if there]
    for platform in found:
        if any(installed(plugin) for plugin in _PLUGINS[platform]):
            return platform
    for platform in found:
        logger.warning(
            "this host has an accelerator (%s), but JAX's plugin for it is not installed "
            "(pip install -e '.[%s]'): running on the CPU",
            *(_NAMES[platform], platform),
        )
    return "cpu"


def _has_tpu(root: Path, environment: Mapping[str, str]) -> bool:
    if any(environment.get(name) for name in _TPU_VARIABLES):
        return True
    # /dev/accel0; not /dev/accel/accel0, which is how Linux names other vendors' accelerators.
    if any((root / "dev").glob("accel[0-9]*")):
        return True
    return any(
        _text(device / "vendor") == _GOOGLE
        and not _text(device / "class").startswith(_STORAGE_OR_NETWORK)
        for device in (root / "sys/bus/pci/devices").glob("*")
    )


def _has_nvidia_gpu(root: Path, environment: Mapping[str, str]) -> bool:
    if environment.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return False
    # The driver's device files: without them CUDA finds nothing, whatever is on the PCI bus.
    # /dev/dxg is the GPU of the Windows Subsystem for Linux.
    return any(any((root / "dev").glob(name)) for name in ("nvidia[0-9]*", "nvidiactl", "dxg"))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
