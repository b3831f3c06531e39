"""A process that was started with a lower priority takes its own when it serves."""

import subprocess
import sys

from tests import golden

CODE = golden.text("commands/priority.txt")


def test_all_threads_take_it():
    # One that is higher than at the start needs no privilege.
    code = CODE.replace("LESS", "5")
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.splitlines() == ["[3]", "[5] {}", "True"]
