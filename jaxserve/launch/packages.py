"""Packages of an image: the locked versions, and a list of them for auditors (an SBOM).

Called by `docker.py` and `cloud_tpu.py`. The locks are `requirements/*.txt` of the checkout, which
`make lock` writes; an installed wheel has them inside.
"""

import importlib.metadata
import json
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jaxserve

_PACKAGE = Path(jaxserve.__file__).resolve().parent
FOLDERS = (_PACKAGE.parent / "requirements", _PACKAGE / "requirements")
SPECIFICATION = "1.6"
"""Version of CycloneDX's format."""
IMAGE = {"sys_platform": "linux", "platform_machine": "x86_64", "python_full_version": "3.12.0"}
"""Environment for which markers of the lock are decided."""


class Locked(NamedTuple):
    """One locked package."""

    name: str
    version: str
    hashes: list[str]
    """SHA-256 of its wheels, one for each platform and Python."""

    @property
    def purl(self) -> str:
        """The package URL by which scanners know the package."""
        return f"pkg:pypi/{self.name}@{self.version}"


def lock_names(extra: str) -> list[str]:
    """Files of the lock that an image with this extra installs; `cpu` has no extra."""
    return ["serve.txt"] if extra == "cpu" else ["serve.txt", f"{extra}.txt"]


def lock_text(name: str) -> str:
    """Returns the text of a file of the lock."""
    folder = next(folder for folder in FOLDERS if folder.is_dir())
    return (folder / name).read_text(encoding="utf-8")


def locked(extra: str) -> list[Locked]:
    """The packages that an image with this extra installs, by name."""
    found = []
    for name in lock_names(extra):
        for line in lock_text(name).replace("\\\n", " ").splitlines():
            if line.startswith(("#", "-")):
                continue
            pin, *hashes = line.split(" --hash=sha256:")
            requirement = Requirement(pin)
            if requirement.marker is None or requirement.marker.evaluate(IMAGE):
                version = str(requirement.specifier).removeprefix("==")
                own = [each.strip() for each in hashes]
                found.append(Locked(canonicalize_name(requirement.name), version, own))
    return sorted(found)


def sbom(extra: str, base: str = "") -> str:
    """The packages of an image in CycloneDX's format, with their licences and dependencies as far
    as they are installed here in these versions.

    The same lock gives the same text: it has no time, and its number is made from its content.

    Args:
      base: the image that the packages are added to, with its digest; empty: not known.
    """
    packages = {package.name: package for package in locked(extra)}
    own = Locked("jaxserve", jaxserve.__version__, [])
    tree: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "version": 1,
        "metadata": {"component": _component(own, "application")},
        "components": [_component(package, "library") for package in packages.values()],
        "dependencies": [
            {"ref": package.purl, "dependsOn": needed}
            for package in [own, *packages.values()]
            if (needed := _needed(package, packages, extra))
        ],
    }
    if base:
        name, _, digest = base.partition("@sha256:")
        tree["components"].append(
            {
                "bom-ref": "base",
                "type": "container",
                "name": name,
                "version": f"sha256:{digest}",
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
        )
    number = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(tree, sort_keys=True))
    return json.dumps({**tree, "serialNumber": f"urn:uuid:{number}"}, indent=1) + "\n"


def _component(package: Locked, kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "bom-ref": package.purl,
        "type": kind,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
    }
    if package.hashes:
        made["hashes"] = [{"alg": "SHA-256", "content": each} for each in package.hashes]
    found = _installed(package)
    if found is not None and (licences := licences_of(found)):
        made["licenses"] = licences
    return made


def licences_of(metadata: Any) -> list[dict[str, Any]]:
    """Licences of a package's metadata: an expression where it has one, else names of licences."""
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = metadata.get_all("Classifier") or ()
    names = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: ")]
    text = (metadata.get("License") or "").strip()
    if not names and text and "\n" not in text:  # others write the whole licence there
        names = [text]
    return [{"license": {"name": name}} for name in names]


def _needed(package: Locked, packages: Mapping[str, Locked], extra: str) -> list[str]:
    """Package URLs of the dependencies that are in the image."""
    found = _installed(package)
    if found is None:
        return []
    extras = ["", extra] if package.name == "jaxserve" else [""]
    return sorted(
        {
            packages[name].purl
            for name in _names(found.get_all("Requires-Dist") or (), extras)
            if name in packages
        }
    )


def _names(requirements: Iterable[str], extras: list[str]) -> Iterable[str]:
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**IMAGE, "extra": each}) for each in extras):
            yield canonicalize_name(requirement.name)


def _installed(package: Locked) -> Any:
    """Metadata of a package that is installed here in the locked version; otherwise None."""
    try:
        found = importlib.metadata.metadata(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found if found["Version"] == package.version else None
