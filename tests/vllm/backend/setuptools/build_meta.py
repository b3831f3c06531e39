"""A build backend that names a source package and builds nothing.

`pip download` asks the backend of a source package for its metadata, and vLLM's imports torch for
that. pip only compares name and version, which PKG-INFO has.
"""

import shutil
from email import message_from_string
from pathlib import Path
from typing import Any


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Nothing."""
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """The metadata that the package brings along."""
    known = message_from_string(Path("PKG-INFO").read_text(encoding="utf-8"))
    folder = Path(metadata_directory, f"{known['Name']}-{known['Version']}.dist-info")
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
