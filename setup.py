"""Puts `configs/` (deployments, models, hardware, the demo) into the wheel, as `jaxserve/configs`.

Everything else about the package is in pyproject.toml.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """An ordinary build, and the configurations; an editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                "configs", Path(self.build_lib, "jaxserve", "configs"), dirs_exist_ok=True
            )


setup(cmdclass={"build_py": BuildWithConfigs})
