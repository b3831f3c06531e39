"""Programs that judge rendered files, where they are."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def judge(name: str, *arguments: str | Path) -> None:
    """Runs a linter, from the environment of the tests or the system; its complaints fail."""
    own = Path(sys.executable).with_name(name)
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
