"""Location of the configurations that come with the package: deployments, models, hardware, demo.

A checkout has them in `configs/`, beside the package; an installed wheel has them inside. Called by
the deployment reader, the planner and the benches.
"""

from pathlib import Path
from typing import Any

from jaxserve.config.yaml_text import read_yaml

_PACKAGE = Path(__file__).resolve().parents[1]

CONFIGS = next(
    folder for folder in (_PACKAGE.parent / "configs", _PACKAGE / "configs") if folder.is_dir()
)
"""The folder with `*.yaml` deployments, `models/`, `hardware/` and `demo/`."""


def hardware_file(hardware: str) -> dict[str, Any]:
    """Contents of a file of `hardware/`; empty if the file does not exist."""
    path = CONFIGS / "hardware" / f"{hardware.lower()}.yaml"
    if not hardware or not path.is_file():
        return {}
    return read_yaml(path.read_text(encoding="utf-8"), str(path))


def device_kind(hardware: str) -> str:
    """JAX's name of the first device kind in a file of `hardware/`; empty without a file."""
    kinds = hardware_file(hardware).get("device_kinds", [])
    return str(kinds[0]) if kinds else ""


def deployment_names() -> list[str]:
    """Names of the deployment files that come with the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def deployment_path(path: Path) -> Path:
    """Finds a deployment file by its path or, if no such file exists, by the name of a file that
    comes with the package: `demo`, or `configs/demo.yaml` outside of a checkout.

    A path that is neither is returned unchanged, for the reader of the file to refuse.
    """
    if path.exists():
        return path
    bare = path.parent in (Path(), Path("configs"))
    shipped = CONFIGS / f"{path.name.removesuffix('.yaml')}.yaml"
    return shipped if bare and shipped.is_file() else path
