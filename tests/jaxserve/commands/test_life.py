"""The life of a serving process: what it takes for itself at the start."""

import subprocess
import sys

import pytest

from tests import golden

CODE = golden.text("commands/life.txt")


@pytest.mark.parametrize(("soft", "hard"), [(300, 1200), (1200, 1200)])
def test_it_may_open_as_many_files_as_the_system_lets_it(soft, hard):
    code = CODE.replace("LIMITS", f"{soft, hard}")
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "(1200, 1200)\n"
