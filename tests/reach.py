"""Which functions every test file reaches: `python -m pytest -p tests.reach --reach FOLDER`.

`mutants.py` reads the files: one for each test file, with the seconds that its tests took.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOL = 3  # one of two that sys.monitoring leaves to everybody


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--reach", type=Path, help="folder for what every test file reaches")


def pytest_configure(config: Any) -> None:
    folder = config.getoption("--reach")
    if folder and not (config.option.numprocesses and not hasattr(config, "workerinput")):
        config.pluginmanager.register(Reach(folder))


class Reach:
    """Notes every function of the package at its first call within a test file."""

    def __init__(self, folder: Path):
        self.folder, self.file, self.started = folder, "", 0.0
        self.reached: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        events = sys.monitoring.events.PY_START
        sys.monitoring.use_tool_id(TOOL, "reach")
        sys.monitoring.register_callback(TOOL, events, self._on_start)
        sys.monitoring.set_events(TOOL, events)

    def _on_start(self, code: CodeType, _: int) -> Any:
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT / "jaxserve"):
            self.reached[self.file].add(f"{path.relative_to(ROOT)}:{code.co_qualname}")
        return sys.monitoring.DISABLE

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if (file := nodeid.split("::")[0]) != self.file:
            self.file = file
            sys.monitoring.restart_events()
        self.started = time.monotonic()

    def pytest_runtest_logfinish(self) -> None:
        self.seconds[self.file] += time.monotonic() - self.started

    def pytest_sessionfinish(self) -> None:
        sys.monitoring.free_tool_id(TOOL)
        self.folder.mkdir(parents=True, exist_ok=True)
        for file, seconds in self.seconds.items():
            entry = {"file": file, "seconds": seconds, "reaches": sorted(self.reached[file])}
            (self.folder / f"{file.replace('/', '.')}.json").write_text(json.dumps(entry))
