"""Where the configurations that come with the package are: deployments, models, hardware, the demo.

In a checkout that is `configs/`, beside the package; an installed wheel has it inside. Called by
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
    """What a file of `hardware/` says; nothing: there is none."""
    path = CONFIGS / "hardware" / f"{hardware.lower()}.yaml"
    if not hardware or not path.is_file():
        return {}
    found: dict[str, Any] = read_yaml(path.read_text(encoding="utf-8"), str(path))
    return found


def device_kind(hardware: str) -> str:
    """The first device kind, as JAX names it, of a file of `hardware/`; empty: there is none."""
    kinds = hardware_file(hardware).get("device_kinds", [])
    return str(kinds[0]) if kinds else ""


def deployment_names() -> list[str]:
    """Names of the deployment files that come with the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def deployment_path(path: Path) -> Path:
    """A deployment file by its path or, where no such file exists, by the name of one that comes
    with the package: `demo`, or `configs/demo.yaml` away from a checkout.

    A path that is neither comes back as it is, for the reader of the file to refuse.
    """
    if path.exists():
        return path
    bare = path.parent in (Path(), Path("configs"))
    shipped = CONFIGS / f"{path.name.removesuffix('.yaml')}.yaml"
    return shipped if bare and shipped.is_file() else path
