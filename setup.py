"""Puts `configs/` (deployments, models, hardware, the demo) and `requirements/` (locked packages)
into the wheel, as `jaxserve/configs` and `jaxserve/requirements`, and says its version.

Everything else about the package is in pyproject.toml.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
WRITTEN = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def version() -> str:
    """Returns the version: of a build's JAXSERVE_VERSION, else of git's last tag `vX.Y.Z` with the
    commits since (`X.Y.Z+1.devN+gCOMMIT`), else what `jaxserve/__init__.py` says: a tarball, and a
    source package of such a build, have no tags.
    """
    found = WRITTEN.search((ROOT / "jaxserve" / "__init__.py").read_text(encoding="utf-8"))
    assert found is not None
    if given := os.environ.get("JAXSERVE_VERSION"):
        return given
    describe = ["git", "-C", str(ROOT), "describe", "--tags", "--long", "--match", "v[0-9]*"]
    if not (ROOT / ".git").exists():
        return found[1]
    try:
        told = subprocess.run(describe, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return found[1]
    tag, commits, commit = told.stdout.strip().removeprefix("v").rsplit("-", 2)
    if commits == "0":
        return tag
    *before, last = tag.split(".")
    return f"{'.'.join([*before, str(int(last) + 1)])}.dev{commits}+{commit}"


class BuildWithConfigs(build_py):
    """An ordinary build with both folders, and with its version in the package; an editable install
    finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in ("configs", "requirements"):
                target = Path(self.build_lib, "jaxserve", folder)
                shutil.copytree(folder, target, dirs_exist_ok=True)
            package = Path(self.build_lib, "jaxserve", "__init__.py")
            said = f'__version__ = "{self.distribution.get_version()}"'
            text = package.read_text(encoding="utf-8")
            package.write_text(WRITTEN.sub(said, text), encoding="utf-8")


if __name__ == "__main__":
    setup(version=version(), cmdclass={"build_py": BuildWithConfigs})
