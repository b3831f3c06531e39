"""Puts `configs/` (deployments, models, hardware, the demo) and `requirements/` (locked packages)
into the wheel, as `jaxserve/configs` and `jaxserve/requirements`.

Everything else about the package is in pyproject.toml.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """An ordinary build with both folders; an editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in ("configs", "requirements"):
                target = Path(self.build_lib, "jaxserve", folder)
                shutil.copytree(folder, target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
