"""Whoever waits, waits by a monotonic clock, so that a wall clock that jumps changes no deadline.

The wall clock is read only where people are told what time it is.
"""

import ast
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
ALLOWED = {
    "jaxserve/bench/report.py": "the date of a report",
    "jaxserve/observe/recorder.py": "brings the spans of several hosts to one axis",
    "jaxserve/preflight/meeting.py": "compares the clocks of hosts",
    "jaxserve/roles/attention.py": "when a stage began, for timelines",
    "jaxserve/roles/whole_steps.py": "the same",
    "jaxserve/server/http/chat.py": "`created` of OpenAI's API",
    "jaxserve/server/http/completions.py": "the same",
    "jaxserve/server/http/live.py": "the time on the page",
    "jaxserve/server/http/response_route.py": "`created_at` of OpenAI's API",
    "jaxserve/server/http/service.py": "`created` of a model",
    "jaxserve/server/engine_metrics.py": "whether the gauges of the pipeline are of lately",
    "jaxserve/server/tracing.py": "when a span began and ended",
    "jaxserve/text/template_worker.py": "`strftime_now` of chat templates",
}


def wall_clocks(source: str) -> list[str]:
    """References to the wall clock, whether they are called or handed on."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found += [wall for wall in WALL if name == wall or name.endswith(f".{wall}")]
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"time.{name.name}" for name in node.names if f"time.{name.name}" in WALL]
    return found


def test_nobody_waits_by_the_wall_clock():
    files = {
        str(file.relative_to(REPOSITORY))
        for folder in ("jaxserve", "launch")
        for file in (REPOSITORY / folder).rglob("*.py")
        if wall_clocks(file.read_text())
    }
    assert files <= set(ALLOWED), "they read the wall clock"
    assert set(ALLOWED) <= files, "they do not any more"


def test_what_counts_as_the_wall_clock():
    assert wall_clocks("import time; clock = time.time") == ["time.time"]
    assert wall_clocks("from time import time_ns") == ["time.time_ns"]
    assert wall_clocks("datetime.datetime.now()") == ["datetime.now"]
    assert wall_clocks("time.monotonic(); self.time.sleep(1); runtime.time") == []
